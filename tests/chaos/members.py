# SPDX-License-Identifier: Apache-2.0
"""The processes of one trial: starts them, talks to its workers, and finds what they have left behind."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tests.shared.harness.network import Network

LOOPBACK = "127.0.0.1"
_SCRUBBED = ("BPS_", "BYTEPS_", "DMLC_", "PS_", "NCCL_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_")


class Trial(Protocol):
    """What all trials have."""

    @property
    def number(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def members(self) -> list[str]: ...
    @property
    def needs_network(self) -> bool: ...
    def describe(self) -> str: ...


class HangError(Exception):
    """Something that must happen does not."""


class Members:
    """A trial in progress. `folder` is for its logs; it may stay, everything else may not.

    A subclass says what happens: start(), play(), end().
    """

    def __init__(self, trial: Trial, folder: Path, patience: float) -> None:
        self.members_of = trial
        self.folder = folder
        self.patience = patience
        self.violations: list[str] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.network: Network | None = None
        self.port = _free_port()
        self._secret = secrets.token_hex(16)
        self._pids: set[int] = set()
        self._reports: dict[int, _Lines] = {}

    def __call__(self) -> list[str]:
        """What the trial violated."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        before = _shared_memory()
        try:
            with ExitStack() as stack:
                if self.members_of.needs_network:
                    self.network = stack.enter_context(Network(self.members_of.members))
                stack.callback(self._kill_all)
                self.start()
                self.play()
                self.end()
        except HangError as hang:
            self.violations.append(str(hang))
        left = _alive(self._pids) + sorted(_shared_memory() - before) + _sockets(self._pids)
        left += [str(path) for path in (self.folder / "tmp").rglob("*") if not path.is_dir()]
        self.violations += [f"left behind: {what}" for what in left]
        return self.violations

    def start(self) -> None:
        """Starts the processes, and returns when all of them are at work."""
        raise NotImplementedError

    def play(self) -> None:
        """Lets it happen, and judges what follows."""
        raise NotImplementedError

    def end(self) -> None:
        """Everybody ends by himself."""
        raise NotImplementedError

    # ---- Processes

    def address(self, member: str) -> str:
        """Where the member is reached by the scheduler's connections."""
        return LOOPBACK if self.network is None else self.network.address(member, "control")

    def spawn(self, member: str, command: list[str], env: dict[str, str]) -> None:
        """Starts a member, with these variables beside those that all have."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
        env = kept | {
            "BPS_SECRET": self._secret,
            "BPS_JOB_ID": self._secret[:8],
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        } | env  # fmt: skip
        if self.members_of.transport != "auto":
            env["BPS_TRANSPORT"] = self.members_of.transport
        if self.members_of.transport == "rdma":
            env["BPS_RDMA_HCA"] = f"={os.environ.get('BPS_TEST_HCA', '')}"
        inside: list[str] = []
        if self.network is not None:
            env["BPS_NODE_HOST"] = self.network.address(member, "data")
            inside = self.network.inside(member)
        with (self.folder / f"{member.replace(' ', '-')}.log").open("ab") as log:
            self.processes[member] = subprocess.Popen(
                [*inside, *command], env=env, cwd=self.folder / "tmp", stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._pids.add(self.processes[member].pid)

    def spawn_worker(self, rank: int, script: str, spec: dict[str, Any], env: dict[str, str]) -> None:
        """Starts a worker that runs `script`, of this folder."""
        env = {"CHAOS_SPEC": json.dumps(spec), "CHAOS_REPORT": str(self._report_of(rank))} | env
        self.spawn(f"worker {rank}", [sys.executable, str(Path(__file__).with_name(script))], env)

    def _kill_all(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()

    def is_dead(self, rank: int) -> bool:
        return self.processes[f"worker {rank}"].poll() is not None

    def somebody_failed(self) -> bool:
        return any(process.poll() not in (None, 0) for process in self.processes.values())

    def wait_for_end(self, member: str, seconds: float) -> int | None:
        """The status with which a member ends; None: it does not."""
        try:
            return self.processes[member].wait(seconds * self.patience)
        except subprocess.TimeoutExpired:
            self.violations.append(f"{member} does not end")
            self._describe_threads()
            return None

    def judge_reports(self, workers: int, survivors: list[int]) -> None:
        """Takes over what workers have found themselves; those that are left have checked their arrays at the end."""
        for rank in range(workers):
            for line in self.lines(rank, "violation"):
                self.violations.append(f"worker {rank}: {line['text']}")
            if rank in survivors and not self.said(rank, "checked"):
                self.violations.append(f"worker {rank} could not check its arrays")

    # ---- Talking to workers

    def _report_of(self, rank: int) -> Path:
        return self.folder / f"worker-{rank}.jsonl"

    def lines(self, rank: int, what: str) -> list[dict[str, Any]]:
        """What a worker has reported."""
        if rank not in self._reports:
            self._reports[rank] = _Lines(self._report_of(rank))
        return [line for line in self._reports[rank].read() if line["what"] == what]

    def said(self, rank: int, what: str) -> bool:
        return bool(self.lines(rank, what))

    def tell(self, member: str, word: str) -> None:
        """Gives a worker a command."""
        pipe = self.processes[member].stdin
        assert pipe is not None
        try:
            pipe.write(f"{word}\n".encode())
            pipe.flush()
        except BrokenPipeError:
            pass  # it has ended; that is looked at elsewhere

    def wait_until(self, done: Callable[[], bool], seconds: float, else_: str, hopeless: Callable[[], bool]) -> None:
        """Raises HangError where it does not become true."""
        deadline = time.monotonic() + seconds * self.patience
        while not done():
            if hopeless() and not done():
                ended = {name: process.poll() for name, process in self.processes.items()}
                raise HangError(f"{else_}: ended are {[f'{n} ({s})' for n, s in ended.items() if s is not None]}")
            if time.monotonic() > deadline:
                self._describe_threads()
                raise HangError(f"{else_} within {seconds * self.patience:.0f} s")
            time.sleep(0.02)

    def _describe_threads(self) -> None:
        """Leaves a file that tells a process that hangs from one that gets no processor time."""
        fields = ("comm", "stat", "wchan", "syscall")
        with (self.folder / "threads").open("a") as out:
            print("load", Path("/proc/loadavg").read_text().strip(), file=out)
            for member, process in self.processes.items():
                for task in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
                    try:
                        print(member, *((task / field).read_text().strip() for field in fields), sep="; ", file=out)
                    except OSError:
                        continue  # it has ended meanwhile


class _Lines:
    """The lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offset += len(whole) + 1
                self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines


def describe_status(status: int) -> str:
    """How a process ended."""
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def binary(name: str) -> str:
    """The path of bps-server or bps-scheduler."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    found = shutil.which(name) or beside
    if found is None:
        raise FileNotFoundError(f"{name} is neither on PATH nor beside {sys.executable}")
    return found


def _free_port() -> int:
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("*bps*") if "bps-vm." not in path.name}


def _sockets(pids: set[int]) -> list[str]:
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@bps-" in line]
    return [f"socket {name}" for name in names if name.split("-")[1] in {str(pid) for pid in pids}]


def _alive(sessions: set[int]) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[3]) in sessions:
            found.append(f"process {stat.parent.name}")
    return found

# SPDX-License-Identifier: Apache-2.0
"""Runs one trial: starts its processes, lets the event happen, and judges what comes out of it."""

from __future__ import annotations

import json
import os
import random
import re
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
from typing import Any

from tests.chaos import plan
from tests.chaos.freeze import freeze
from tests.chaos.network import Network

_LOOPBACK = "127.0.0.1"
_SCRUBBED = ("BPS_", "BYTEPS_", "DMLC_", "PS_", "NCCL_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_")


class Run:
    """A trial in progress. `folder` is for its logs; it may stay, everything else may not."""

    def __init__(self, trial: plan.Trial, folder: Path, patience: float) -> None:
        self.trial = trial
        self.folder = folder
        self.patience = patience
        self.violations: list[str] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._network: Network | None = None
        self._port = _free_port()
        self._secret = secrets.token_hex(16)
        self._random = random.Random(f"{trial.seed}/{trial.number}/run")

    def __call__(self) -> list[str]:
        """What the trial violated."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        before = _shared_memory()
        try:
            with ExitStack() as stack:
                if self.trial.event == "cut":
                    self._network = stack.enter_context(Network(self.trial.members))
                stack.callback(self._kill_all)
                self._start()
                self._play()
                self._end()
        except _HangError as hang:
            self.violations.append(str(hang))
        left = _alive({process.pid for process in self.processes.values()})
        left += sorted(_shared_memory() - before) + _sockets({process.pid for process in self.processes.values()})
        left += [str(path) for path in (self.folder / "tmp").rglob("*") if not path.is_dir()]
        self.violations += [f"left behind: {what}" for what in left]
        return self.violations

    # ---- Starting

    def _start(self) -> None:
        if self.trial.servers:
            self._spawn("scheduler", [_binary("bps-scheduler")], {"DMLC_ROLE": "scheduler"})
            for index in range(self.trial.servers):
                self._spawn(f"server {index}", [_binary("bps-server")], {"DMLC_ROLE": "server"})
        for rank in range(self.trial.workers):
            env = {
                "CHAOS_SPEC": json.dumps(plan.spec(self.trial, rank)),
                "CHAOS_REPORT": str(self._report_of(rank)),
            }
            if self.trial.hosts:
                env["BPS_HOST_ID"] = self.trial.hosts[rank]
            if self.trial.servers:
                env |= {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)}
            else:
                apart = self._network is not None  # each namespace is a host
                env |= {
                    "RANK": str(rank), "WORLD_SIZE": str(self.trial.workers), "LOCAL_RANK": "0" if apart else str(rank),
                    "LOCAL_WORLD_SIZE": "1" if apart else str(self.trial.workers), "MASTER_ADDR": self._root(),
                    "MASTER_PORT": str(self._port), "BPS_ROOT_PORT": str(self._port),
                }  # fmt: skip
            self._spawn(f"worker {rank}", [sys.executable, str(Path(__file__).with_name("worker.py"))], env)
        for rank in range(self.trial.workers):
            self._await(lambda rank=rank: self._said(rank, "ready"), plan.START_S, f"worker {rank} did not start",
                        self._somebody_failed)  # fmt: skip

    def _root(self) -> str:
        if self._network is None:
            return _LOOPBACK
        return self._network.address("scheduler" if self.trial.servers else "worker 0", "control")

    def _spawn(self, member: str, command: list[str], env: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
        late = self.trial.event == "late"
        env = kept | {
            "BPS_SECRET": self._secret,
            "BPS_JOB_ID": self._secret[:8],
            "BPS_TIMEOUT": str((plan.SHORT_TIMEOUT_S if late else plan.TIMEOUT_S) * self.patience),
            "BPS_HEARTBEAT_TIMEOUT": str(plan.HEARTBEAT_S * self.patience),
            "BPS_JOIN_TIMEOUT": str(plan.START_S * self.patience),
            "BPS_SHUTDOWN_TIMEOUT": str(plan.SHUTDOWN_S * self.patience),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        } | env  # fmt: skip
        if self.trial.transport != "auto":
            env["BPS_TRANSPORT"] = self.trial.transport
        if self.trial.transport == "rdma":
            env["BPS_RDMA_HCA"] = f"={os.environ.get('BPS_TEST_HCA', '')}"
        if self.trial.servers:
            env |= {
                "DMLC_NUM_WORKER": str(self.trial.workers), "DMLC_NUM_SERVER": str(self.trial.servers),
                "DMLC_PS_ROOT_URI": self._root(), "DMLC_PS_ROOT_PORT": str(self._port),
            }  # fmt: skip
        inside: list[str] = []
        if self._network is not None:
            env["BPS_NODE_HOST"] = self._network.address(member, "data")
            inside = self._network.inside(member)
        with (self.folder / f"{member.replace(' ', '-')}.log").open("wb") as log:
            self.processes[member] = subprocess.Popen(
                [*inside, *command], env=env, cwd=self.folder / "tmp", stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    # ---- The event, and what must follow

    def _play(self) -> None:
        time.sleep(self.trial.delay_s)
        event, victim = self.trial.event, self.processes[self.trial.victim]
        begin = time.monotonic()
        if event in ("kill", "segfault"):
            victim.send_signal(signal.SIGKILL if event == "kill" else signal.SIGSEGV)
        elif event == "stop":
            victim.send_signal(signal.SIGSTOP)
        elif event in ("exception", "exit", "late"):
            self._tell(self.trial.victim, event)
        elif event == "cut":
            assert self._network is not None
            self._network.cut(self.trial.victim, self.trial.plane, self.trial.direction)
            begin = time.monotonic()  # it takes a process for each member, on a busy machine seconds
        elif event == "pause":
            victim.send_signal(signal.SIGSTOP)
            time.sleep(plan.PAUSE_S)
            victim.send_signal(signal.SIGCONT)
        elif event == "freeze":
            freeze(
                int(self._random.choice([task.name for task in Path(f"/proc/{victim.pid}/task").iterdir()])),
                plan.PAUSE_S,
            )
        if event in plan.LETHAL:
            self._expect_errors(begin)
            if event == "stop":
                victim.send_signal(signal.SIGCONT)
                time.sleep(0.7)  # whatever it can still write it writes at once
        else:
            self._expect_progress()

    def _survivors(self) -> list[int]:
        # Who is cut off must hear of it, too.
        gone = self.trial.victim if self.trial.event in plan.LETHAL and self.trial.event != "cut" else ""
        return [rank for rank in range(self.trial.workers) if f"worker {rank}" != gone]

    def _expect_errors(self, begin: float) -> None:
        """Every survivor raises within its deadline, and names the culprit."""
        limit = plan.TIMEOUT_S * self.patience + 2
        if not self._survivors():  # the servers hear of it, too, and a stopped worker stays stopped until then
            others = [process for member, process in self.processes.items() if member != self.trial.victim]
            self._await(lambda: all(process.poll() is not None for process in others),
                        limit + plan.SHUTDOWN_S * self.patience + 2, "the servers are not told of the event",
                        lambda: False)  # fmt: skip
        for rank in self._survivors():
            self._await(lambda rank=rank: self._said(rank, "over"), limit + plan.SHUTDOWN_S * self.patience + 2,
                        f"worker {rank} is not told of the event", lambda rank=rank: self._is_dead(rank))  # fmt: skip
            errors = self._lines(rank, "error")
            if not errors:
                self.violations.append(f"worker {rank} got no error")
                continue
            if errors[0]["at"] - begin > limit:
                self.violations.append(f"worker {rank} heard of it after {errors[0]['at'] - begin:.1f} s")
            patterns = plan.culprits(self.trial, self.processes[self.trial.victim].pid)
            if f"worker {rank}" == self.trial.victim:
                patterns = ["worker", "server", "scheduler"]
            if not any(re.search(pattern, error["text"]) for error in errors for pattern in patterns):
                self.violations.append(f"worker {rank}: no error names {self.trial.victim}: {errors[0]['text']}")

    def _expect_progress(self) -> None:
        """The job goes on and ends as if nothing had happened; a late rank costs errors and no more."""
        counted = [len(self._lines(rank, "round")) for rank in range(self.trial.workers)]
        late = self.trial.event == "late"
        for rank, before in enumerate(counted):
            self._await(lambda rank=rank, before=before: len(self._lines(rank, "round")) > before, 30,
                        f"worker {rank} does not go on", self._somebody_failed)  # fmt: skip
        self._tell("worker 0", "stop")
        for rank in range(self.trial.workers):
            self._await(lambda rank=rank: self._said(rank, "over"), 30, f"worker {rank} does not end",
                        self._somebody_failed)  # fmt: skip
            errors = [error for error in self._lines(rank, "error") if not late or error["kind"] == "PeerLostError"]
            if errors:
                self.violations.append(f"worker {rank}: {errors[0]['kind']}: {errors[0]['text']}")

    # ---- The end

    def _end(self) -> None:
        """Everybody ends by himself; the arrays are as they were when the last call raised or returned."""
        for rank in self._survivors():
            self._tell(f"worker {rank}", "check")
        for member, process in self.processes.items():
            gone = member == self.trial.victim and self.trial.event in plan.LETHAL
            if gone and process.poll() is None and member.startswith("worker"):
                self._tell(member, "check")
            try:
                status = process.wait(8 * self.patience)
            except subprocess.TimeoutExpired:
                self.violations.append(f"{member} does not end")
                self._describe_threads()
                continue
            clean = not gone and (member.startswith("worker") or self.trial.event not in plan.LETHAL)
            if status < 0 and not (gone and self.trial.event in ("kill", "segfault", "stop")):
                self.violations.append(f"{member} died of {signal.Signals(-status).name}")
            elif clean and status != 0:
                self.violations.append(f"{member} ended with status {status}")
        for rank in range(self.trial.workers):
            for line in self._lines(rank, "violation"):
                self.violations.append(f"worker {rank}: {line['text']}")
            if rank in self._survivors() and not self._said(rank, "checked"):
                self.violations.append(f"worker {rank} could not check its arrays")

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

    def _kill_all(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()

    # ---- Talking to workers

    def _report_of(self, rank: int) -> Path:
        return self.folder / f"worker-{rank}.jsonl"

    def _lines(self, rank: int, what: str) -> list[dict[str, Any]]:
        path = self._report_of(rank)
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["what"] == what]

    def _said(self, rank: int, what: str) -> bool:
        return bool(self._lines(rank, what))

    def _tell(self, member: str, word: str) -> None:
        pipe = self.processes[member].stdin
        assert pipe is not None
        try:
            pipe.write(f"{word}\n".encode())
            pipe.flush()
        except BrokenPipeError:
            pass  # it has ended; that is looked at elsewhere

    def _is_dead(self, rank: int) -> bool:
        return self.processes[f"worker {rank}"].poll() is not None

    def _somebody_failed(self) -> bool:
        return any(process.poll() not in (None, 0) for process in self.processes.values())

    def _await(self, done: Callable[[], bool], seconds: float, else_: str, hopeless: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds * self.patience
        while not done():
            if hopeless() and not done():
                ended = {name: process.poll() for name, process in self.processes.items()}
                raise _HangError(f"{else_}: ended are {[f'{n} ({s})' for n, s in ended.items() if s is not None]}")
            if time.monotonic() > deadline:
                self._describe_threads()
                raise _HangError(f"{else_} within {seconds * self.patience:.0f} s")
            time.sleep(0.02)


class _HangError(Exception):
    """Something that must happen does not."""


def _binary(name: str) -> str:
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

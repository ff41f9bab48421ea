# SPDX-License-Identifier: Apache-2.0
"""Runs one job of real processes for a test.

`run(body, workers=3)` calls `body(bps_rdma, *args)` on three ranks, each a process of its own, and returns what the
three calls returned. `start()` gives the running job, for tests that kill members. A job ends with its `with` block:
every process that it started is then gone, and the block fails if one of them left something behind.

Ranks are forked from a clean server process (multiprocessing's forkserver) that has imported numpy and bps_rdma but
started nothing: a rank is up in milliseconds instead of a second. Dedicated servers and the scheduler are the plain
binaries, started as anybody would.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environment import IDENTITY, binary, clean_env
from .forkserver import CONTEXT, start_forkserver
from .leftovers import leftovers, shared_memory_files
from .ports import LOOPBACK, free_port
from .rank import run_rank, run_script, run_server
from .waiting import PATIENCE

_DEADLINE_S = 120.0
Body = Callable[..., Any]


class JobFailedError(AssertionError):
    """A rank, a server or the scheduler did not end as it should; shows the output of all."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `value` is what its body returned, `error` the traceback if it raised."""

    value: Any
    error: str
    status: int
    output: str


@dataclass
class Job:
    """A job to start. See start() for the meaning of the fields."""

    body: Body
    args: Sequence[Any] = ()
    workers: int = 2
    servers: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    rank_env: Sequence[Mapping[str, str]] = ()
    init: bool = True
    python_servers: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bps-test-"))
        self.name = secrets.token_hex(8)
        self.port = self.port or free_port()
        self.ranks: list[Any] = []
        self.helpers: dict[str, Any] = {}  # "scheduler", "server 0", ...: Popen, or a Process for a Python server
        self._shm_before = shared_memory_files()

    # ---- Starting

    def __enter__(self) -> Job:
        start_forkserver()
        try:
            if self.servers is not None:
                self._start_binary("scheduler", "bps-scheduler")
                for index in range(self.servers):
                    self._start_server(index)
            for rank in range(self.workers):
                env = self._worker_env(rank)
                args = (self.body, tuple(self.args), env, str(self.folder), rank, self.init)
                self.ranks.append(CONTEXT.Process(target=run_rank, args=args, daemon=True))
                self.ranks[-1].start()
        except BaseException:
            self._end_all()
            raise
        return self

    def _common_env(self) -> dict[str, str]:
        return clean_env(
            BPS_JOB_ID=self.name,
            BPS_SECRET=self.name,
            BPS_TIMEOUT=str(100 * PATIENCE),
            # Not what these tests are about, unless they set it: on a busy machine the default may be too short.
            BPS_HEARTBEAT_TIMEOUT="20",
            BPS_TEST_FOLDER=str(self.folder),
        )

    def _roles_env(self) -> dict[str, str]:
        return {
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_NUM_SERVER": str(self.servers),
            "DMLC_PS_ROOT_URI": LOOPBACK,
            "DMLC_PS_ROOT_PORT": str(self.port),
        }

    def _worker_env(self, rank: int) -> dict[str, str]:
        env = self._common_env()
        if self.servers is None:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.workers),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.workers),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(self.port),
            }
        else:
            env |= self._roles_env() | {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)}
        env |= dict(self.env)
        return env | dict(self.rank_env[rank]) if self.rank_env else env

    def _helper_env(self, role: str) -> dict[str, str]:
        return self._common_env() | self._roles_env() | {"DMLC_ROLE": role} | dict(self.env)

    def _start_server(self, index: int) -> None:
        if not self.python_servers:
            self._start_binary(f"server {index}", "bps-server")
            return
        process = CONTEXT.Process(
            target=run_server, args=(self._helper_env("server"), str(self.folder), index), daemon=True
        )
        process.start()
        self.helpers[f"server {index}"] = process

    def _start_binary(self, label: str, name: str) -> None:
        with self._log(label).open("ab") as log:
            self.helpers[label] = subprocess.Popen(
                [binary(name)], env=self._helper_env(name.removeprefix("bps-")), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    # ---- While it runs

    def pid(self, member: str) -> int:
        """Of "rank 1", "server 0" or "scheduler"."""
        kind, _, index = member.partition(" ")
        return int(self.ranks[int(index)].pid if kind == "rank" else self.helpers[member].pid)

    def kill(self, member: str, signum: int = signal.SIGKILL) -> float:
        """Sends a signal; returns the moment, on the clock that time.monotonic() of every process reads."""
        os.kill(self.pid(member), signum)
        return time.monotonic()

    def start_again(self, member: str) -> None:
        """Starts "scheduler" or "server 0" once more, after it has ended. Its log goes on."""
        assert _status(self.helpers[member]) is not None, f"{member} still runs"
        self._start_binary(member, "bps-" + member.split(maxsplit=1)[0])

    def await_marks(self, mark: str, ranks: Sequence[int] | None = None, timeout: float = 60) -> None:
        """Waits until those ranks (default: all) have called `mark(mark)`."""
        wanted = range(self.workers) if ranks is None else ranks
        deadline = time.monotonic() + timeout * PATIENCE
        for rank in wanted:
            while not (self.folder / f"mark-{rank}-{mark}").exists():
                if time.monotonic() > deadline or self.ranks[rank].exitcode is not None:
                    raise JobFailedError(f"rank {rank} did not come to {mark!r}\n{self._report()}")
                time.sleep(0.01)

    def set_mark(self, mark: str) -> None:
        """For ranks that wait with `await_mark(mark)`."""
        (self.folder / f"mark-test-{mark}").touch()

    # ---- Its end

    def await_end(self, member: str, timeout: float = 60) -> None:
        """Waits until "rank 1" has ended, however it ends."""
        process = self.ranks[int(member.removeprefix("rank "))]
        process.join(timeout * PATIENCE)
        if process.exitcode is None:
            raise JobFailedError(f"{member} did not end\n{self._report()}")

    def outcomes(self, timeout: float = _DEADLINE_S, but: Sequence[int] = ()) -> list[Outcome]:
        """Waits for every rank (except `but`) and says how it ended."""
        deadline = time.monotonic() + timeout * PATIENCE
        late = []
        for rank, process in enumerate(self.ranks):
            if rank not in but:
                process.join(max(0.0, deadline - time.monotonic()))
                late += [] if process.exitcode is not None else [rank]
        if late:
            for rank in late:
                os.kill(self.ranks[rank].pid, signal.SIGABRT)  # faulthandler writes all stacks
            for rank in late:
                self.ranks[rank].join(5)
            raise JobFailedError(f"ranks {late} did not end within {timeout} s\n{self._report()}")
        return [self._outcome(rank) for rank in range(self.workers)]

    def results(self, timeout: float = _DEADLINE_S) -> list[Any]:
        """Waits for everybody; returns what the ranks' bodies returned. Fails if anything ended badly."""
        found = self.outcomes(timeout)
        bad = [rank for rank, outcome in enumerate(found) if outcome.error or outcome.status != 0]
        if bad:
            raise JobFailedError(f"ranks {bad} failed\n{self._report()}")
        for label, status in self.helper_statuses().items():
            if status != 0:
                raise JobFailedError(f"{label} ended with status {status}\n{self._report()}")
        return [outcome.value for outcome in found]

    def helper_statuses(self, timeout: float = 20, but: Sequence[str] = ()) -> dict[str, int | None]:
        """Waits for scheduler and servers (except `but`): exit statuses, None for one that still runs."""
        deadline = time.monotonic() + timeout * PATIENCE
        statuses: dict[str, int | None] = {}
        for label, helper in self.helpers.items():
            if label in but:
                continue
            while (status := _status(helper)) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            statuses[label] = status
        return statuses

    def server_metrics(self) -> list[dict[str, int]]:
        """What the Python servers counted until the job was over. Call after results()."""
        return [pickle.loads((self.folder / f"server-{i}.pickle").read_bytes()) for i in range(self.servers or 0)]

    def log(self, member: str) -> str:
        """What "rank 1", "server 0" or "scheduler" has printed so far."""
        return self._log(member).read_text(errors="replace")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        sessions = [process.pid for process in [*self.ranks, *self.helpers.values()] if process.pid]
        self._end_all()
        left = leftovers(set(sessions)) + sorted(shared_memory_files() - self._shm_before)
        shutil.rmtree(self.folder, ignore_errors=True)
        if kind is None and left:
            raise JobFailedError(f"left behind: {left}")

    def _end_all(self) -> None:
        for process in [*self.ranks, *self.helpers.values()]:
            if process.pid and _status(process) is None:
                process.kill()
        for process in self.ranks:
            if process.pid:
                process.join()
        for helper in self.helpers.values():
            helper.join() if isinstance(helper, multiprocessing.process.BaseProcess) else helper.wait()

    def _log(self, label: str) -> Path:
        return self.folder / f"{label.replace(' ', '-')}.log"

    def _outcome(self, rank: int) -> Outcome:
        value, error = None, ""
        result = self.folder / f"rank-{rank}.pickle"
        if result.exists():
            value, error = pickle.loads(result.read_bytes())
        log = self._log(f"rank {rank}")
        output = log.read_text(errors="replace") if log.exists() else ""
        status = self.ranks[rank].exitcode
        return Outcome(value, error, -1 if status is None else status, output)

    def _report(self) -> str:
        lines = []
        for rank in range(len(self.ranks)):
            outcome = self._outcome(rank)
            lines.append(f"---- rank {rank}: status {self.ranks[rank].exitcode}\n{outcome.output}{outcome.error}")
        for label, helper in self.helpers.items():
            log = self._log(label)
            text = log.read_text(errors="replace") if log.exists() else ""
            lines.append(f"---- {label}: status {_status(helper)}\n{text}")
        return "\n".join(lines)


def start(body: Body, *args: Any, **options: Any) -> Job:
    """A job to be used in a `with` statement.

    Options:
        workers: how many ranks.
        servers: None: every rank is a server and rank 0 hosts the scheduler; K: a scheduler and K servers of their own.
        env: variables for every process of the job; rank_env: one mapping per rank, on top.
        init: whether bps.init() is called before the body and bps.shutdown() after it.
        python_servers: dedicated servers run inside Python and keep their counters for server_metrics().
        port: of the scheduler, or MASTER_PORT; default: a free one.
    """
    return Job(body, args, **options)


def run(body: Body, *args: Any, timeout: float = _DEADLINE_S, **options: Any) -> list[Any]:
    """Runs a job to its end; returns what the ranks returned. Options as for start()."""
    with start(body, *args, **options) as job:
        return job.results(timeout)


def scripts(
    *words: str, folder: Path | str = "/", ranks: int = 0, timeout: float = _DEADLINE_S, **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """How `python words...` ends as each rank of a job, or by itself; words: a script or -m and a module, arguments.

    Forked like all ranks, with what they find imported: a process that has to import torch takes 4 s of a processor,
    one that imports Megatron 8 s. For what a script does; that launchers start it as well, other tests have to show.
    """
    unset = () if ranks else (*IDENTITY, "MASTER_ADDR", "MASTER_PORT", "BPS_JOB_ID", "BPS_SECRET")
    found = run(run_script, words, str(folder), unset, workers=ranks or 1, init=False, timeout=timeout, **options)
    return [subprocess.CompletedProcess(words, *one) for one in found]


def succeeded(ranks: list[subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    """Rank 0, once all have ended well."""
    assert not any(one.returncode for one in ranks), "".join(one.stdout + one.stderr for one in ranks)
    return ranks[0]


def _status(process: Any) -> int | None:
    if isinstance(process, multiprocessing.process.BaseProcess):
        return process.exitcode
    return process.poll()  # type: ignore[no-any-return]

# SPDX-License-Identifier: Apache-2.0
"""A job of ranks that call a function of a test, and of servers and a scheduler as anybody starts them.

Ranks are forked from a clean process (multiprocessing's forkserver) that has imported numpy and bps_rdma but started
nothing: a rank is up in milliseconds instead of a second. Dedicated servers and the scheduler are the plain binaries.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environment import IDENTITY, binary, clean_env, of_rank, of_roles, over
from .members import JobFailedError, Members
from .ports import free_port
from .process import is_blocked
from .rank import run_rank, run_script, run_server
from .waiting import PATIENCE

_DEADLINE_S = 200.0  # of a busy machine, too
Body = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `value` is what its body returned, `error` the traceback if it raised."""

    value: Any
    error: str
    status: int
    output: str


class Job(Members):
    """A job to be used in a `with` statement, which starts it. See start() for the arguments."""

    def __init__(
        self, body: Body, args: Sequence[Any], *, workers: int = 2, servers: int | None = None,
        env: Mapping[str, str] | None = None, rank_env: Sequence[Mapping[str, str]] = (), init: bool = True,
        python_servers: bool = False, port: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = secrets.token_hex(8)
        self.port = port or free_port()
        self.workers, self.servers = workers, servers
        self._body, self._args, self._init, self._python_servers = body, tuple(args), init, python_servers
        self._env, self._rank_env = dict(env or {}), rank_env

    # ---- Starting

    def __enter__(self) -> Job:
        try:
            if self.servers is not None:
                self.start_helper("scheduler")
                for index in range(self.servers):
                    self.start_helper(f"server {index}")
            for rank in range(self.workers):
                env = self._worker_env(rank)
                self.fork(f"rank {rank}", run_rank, self._body, self._args, env, str(self.folder), rank, self._init)
        except BaseException:
            self.end()
            raise
        return self

    def start_helper(self, member: str) -> None:
        """Starts "scheduler" or "server 0", which may have been there before and has ended; its log goes on."""
        if member in self.processes:
            self.wait(member)
        role, _, index = member.partition(" ")
        env = self._common_env() | self._roles_env() | {"DMLC_ROLE": role} | self._env
        if role == "server" and self._python_servers:
            self.fork(member, run_server, env, str(self.folder), int(index))
        else:
            self.command(member, [binary(f"bps-{role}")], env)

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
        return of_roles(self.workers, self.servers or 0, self.port)

    def _worker_env(self, rank: int) -> dict[str, str]:
        if self.servers is None:
            identity = of_rank(rank, self.workers, self.port)
        else:
            identity = self._roles_env() | {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)}
        own = dict(self._rank_env[rank]) if self._rank_env else {}
        return self._common_env() | identity | self._env | own

    # ---- While it runs

    def await_marks(self, mark: str, ranks: Sequence[int] | None = None, timeout: float = 120) -> None:
        """Waits until those ranks (default: all) have called `mark(mark)`."""
        for rank in range(self.workers) if ranks is None else ranks:
            marked = functools.partial(self.has_marked, mark, rank)
            self.eventually(marked, timeout, f"{mark!r} of rank {rank}", [f"rank {rank}"])

    def has_marked(self, mark: str, rank: int) -> bool:
        """Whether that rank has called `mark(mark)`."""
        return (self.folder / f"mark-{rank}-{mark}").exists()

    def await_call(self, member: str) -> None:
        """Waits until the call that a rank is about to make, as it has told by a mark, waits for something itself."""
        self.eventually(lambda: is_blocked(self.pid(member)), what=f"a call of {member} that waits", of=[member])

    def interrupt(self, mark: str = "waiting", rank: int = 0, signum: int = signal.SIGINT) -> float:
        """Sends a rank a signal when the call waits that it makes after this mark; says when, as kill() does."""
        self.await_marks(mark, [rank])
        self.await_call(f"rank {rank}")
        return self.kill(f"rank {rank}", signum)

    def set_mark(self, mark: str) -> None:
        """For ranks that wait with `await_mark(mark)`."""
        (self.folder / f"mark-test-{mark}").touch()

    # ---- Its end

    @property
    def ranks(self) -> list[str]:
        return [f"rank {rank}" for rank in range(self.workers)]

    @property
    def helpers(self) -> list[str]:
        """The scheduler and the dedicated servers."""
        return [member for member in self.processes if member not in self.ranks]

    def outcomes(self, timeout: float = _DEADLINE_S, but: Sequence[int] = ()) -> list[Outcome]:
        """Waits for every rank (except `but`) and says how it ended."""
        ended = self.statuses(timeout, but=[*self.helpers, *(f"rank {rank}" for rank in but)])
        if late := [member for member, status in ended.items() if status is None]:
            for member in late:
                self.kill(member, signal.SIGABRT)  # faulthandler writes all stacks
            for member in late:
                self.processes[member].wait(5)
            raise JobFailedError(f"{', '.join(late)} did not end within {timeout} s\n{self.report()}")
        return [self._outcome(rank) for rank in range(self.workers)]

    def results(self, timeout: float = _DEADLINE_S) -> list[Any]:
        """Waits for everybody; returns what the ranks' bodies returned. Fails if anything ended badly."""
        values = self.values(timeout)
        self.succeed(20)
        return values

    def values(self, timeout: float = _DEADLINE_S, but: Sequence[int] = ()) -> list[Any]:
        """Waits for every rank (except `but`); returns what their bodies returned. Fails if one of them did not."""
        found = self.outcomes(timeout, but)
        ranks = [rank for rank in range(self.workers) if rank not in but]
        if bad := [rank for rank in ranks if found[rank].error or not self._result_of(rank).exists()]:
            raise JobFailedError(f"ranks {bad} failed\n{self.report()}")
        return [found[rank].value for rank in ranks]

    def helper_statuses(self, timeout: float = 20, but: Sequence[str] = ()) -> dict[str, int | None]:
        """Waits for scheduler and servers (except `but`): exit statuses, None for one that still runs."""
        return self.statuses(timeout, but=[*self.ranks, *but])

    def server_metrics(self) -> list[dict[str, int]]:
        """What the Python servers counted until the job was over. Call after results()."""
        return [pickle.loads((self.folder / f"server-{i}.pickle").read_bytes()) for i in range(self.servers or 0)]

    def report(self) -> str:
        """How all have ended so far, what they have printed, and what the ranks' bodies raised."""
        raised = {member: self._value_and_error(rank)[1] for rank, member in enumerate(self.ranks)}
        return super().report() + "".join(f"\n---- {rank} raised\n{error}" for rank, error in raised.items() if error)

    def has_failed(self, member: str) -> bool:
        return super().has_failed(member) or (
            member in self.ranks and bool(self._value_and_error(self.ranks.index(member))[1])
        )

    def _result_of(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pickle"

    def _value_and_error(self, rank: int) -> tuple[Any, str]:
        result = self._result_of(rank)
        value, error = pickle.loads(result.read_bytes()) if result.exists() else (None, "")
        return value, str(error)

    def _outcome(self, rank: int) -> Outcome:
        value, error = self._value_and_error(rank)
        process = self.processes[f"rank {rank}"]
        return Outcome(value, error, -1 if process.status is None else process.status, process.output())


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


def run(
    body: Body, *args: Any, timeout: float = _DEADLINE_S, but: Sequence[int] = (), interrupts: bool = False,
    kills: str = "", at: str = "running", **options: Any,
) -> list[Any]:  # fmt: skip
    """Runs a job to its end; returns what the ranks (except `but`, which end otherwise) returned.

    Options as for start(), and:
        interrupts: a call that rank 0 makes by is_interrupted().
        kills: a member that is killed when all ranks have called `mark(at)`; then the mark "killed" is set.
    """
    with start(body, *args, **options) as job:
        if interrupts:
            job.interrupt()
        if kills:
            job.await_marks(at)
            job.kill(kills)
            job.set_mark("killed")
            return job.values(timeout, [*but, *(rank for rank, name in enumerate(job.ranks) if name == kills)])
        return job.values(timeout, but) if but else job.results(timeout)


def on_ranks(*given: str, **options: Any) -> Callable[[Body], Callable[..., None]]:
    """Makes a test of what each rank of a job does: `def test_sums(bps)`. Options as for run(), or functions of them.

    What follows `bps` are fixtures and parameters of the test. Those that are `given` are options of the job instead:
    "workers", "servers", "env", or "transport", which becomes a part of its environment.
    """

    def decorate(body: Body) -> Callable[..., None]:
        taken = [*inspect.signature(body).parameters][1:]

        @functools.wraps(body)
        def test(**values: Any) -> None:
            chosen = {name: one() if callable(one) else one for name, one in options.items()}
            chosen |= {name: values[name] for name in given}
            if transport := chosen.pop("transport", ""):
                chosen["env"] = over(transport) | chosen.get("env", {})
            run(test, *(values[name] for name in taken), **chosen)

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*taken, *given)]
        test.on_each_rank = body  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


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

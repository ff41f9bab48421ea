# SPDX-License-Identifier: Apache-2.0
"""`bps run`: runs a command as several ranks on this machine, with a scheduler and servers if they are needed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import LocalJob, find_binary
from bps_rdma.launch.process import Child, Children, exit_status
from bps_rdma.terminal import print_error


class Interrupted(KeyboardInterrupt):
    """The signal `signum` asked the launcher to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def signals_raise() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise Interrupted in the main thread."""

    def interrupt(signum: int, _: FrameType | None) -> None:
        raise Interrupted(signum)

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@dataclass
class PassOn:
    """The children that get the signals which are for the program, not for its launcher."""

    to: Sequence[Child] = ()

    def __call__(self, signum: int, _: FrameType | None) -> None:
        """The signal handler."""
        for child in self.to:
            if child.status is None:
                os.kill(child.pid, signum)  # it may have ended, and is a zombie then: the number stays its own


@contextmanager
def signals_pass_on() -> Iterator[PassOn]:
    """Pass SIGUSR1 and SIGUSR2 on, by which a cluster warns a job that its time is over (sbatch --signal).

    Only the ranks get them: the processes that a rank has started would be killed.
    """
    pass_on = PassOn()
    before = {n: signal.signal(n, pass_on) for n in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield pass_on
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# A scheduler that is lost so often does not fail by accident.
MOST_SCHEDULERS = 10
SCHEDULERS_WITHIN = 60.0  # seconds
STEPPED_DOWN = 75  # the status of bps-scheduler: it was stopped for too long, and the job may have gone on without it


@dataclass
class Scheduler:
    """The scheduler of a job that has one of its own. When it is lost, and ranks can be, another one takes its place.

    Attributes:
        children: the launcher's.
        job: what it is the scheduler of.
        state: the file by which the next one knows the job; None: there is none.
    """

    children: Children
    job: LocalJob
    state: Path | None = None
    child: Child = field(init=False)
    _starts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._starts.append(time.monotonic())
        environment = self.job.role("scheduler")
        if self.state is not None:
            environment["BPS_SCHEDULER_STATE"] = str(self.state)
        command = self.job.placed("scheduler", [find_binary("bps-scheduler")])
        self.child = self.children.spawn("scheduler", command, environment)

    def start_again(self) -> bool:
        """Whether it has been, after it was lost."""
        status = self.child.status or 0
        recent = [start for start in self._starts if start > time.monotonic() - SCHEDULERS_WITHIN]
        if (status > 0 and status != STEPPED_DOWN) or len(recent) >= MOST_SCHEDULERS:
            return False
        self._start()
        return True


def spawn_helpers(children: Children, job: LocalJob, state: Path | None = None) -> Scheduler | None:
    """Start the scheduler and the dedicated servers of `job`, if it has any. Raises BpsError without binaries."""
    if job.servers is None and job.least is None:
        return None
    scheduler = Scheduler(children, job, state)
    for index in range(job.servers or 0):
        _spawn_server(children, job, f"server {index}")
    return scheduler


def _spawn_server(children: Children, job: LocalJob, label: str) -> Child:
    return children.spawn(label, job.placed(label, [find_binary("bps-server")]), job.role(label))


def run_job(
    job: LocalJob, command: Sequence[str], *, prefixed: bool = False, grace: float = 3.0, restarts: int = 0
) -> int:
    """Run `command` as every worker of `job`; returns the exit status for the shell.

    The status is 0 if all ranks ended with 0, or those that are left of a job that goes on without the others.
    Otherwise it is that of the first process that failed; the other processes then have `grace` seconds to end by
    themselves (they learn of the loss within 2 seconds), and as many again after SIGTERM, before SIGKILL. In a job that
    goes on without lost ranks and servers these are started again, `restarts` times altogether. In such a job another
    scheduler takes the place of one that is lost. If there are too many of that, the job goes on without one, as long
    as no rank fails: the ranks decide what they still need it for.
    """
    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    with (
        signals_raise(),
        signals_pass_on() as pass_on,
        _folder_for_state(job) as state,
        Children(prefixed=prefixed) as children,
    ):
        try:
            scheduler = spawn_helpers(children, job, state)
            servers = [child for child in children.running if scheduler is not None and child is not scheduler.child]
            ranks = [children.spawn(job.label(rank), words, job.worker(rank)) for rank in range(job.workers)]
            pass_on.to = ranks

            def start_again(lost: Child) -> bool:
                nonlocal restarts
                restarts -= 1
                if restarts < 0:
                    return False
                if lost in servers:
                    servers[servers.index(lost)] = _spawn_server(children, job, lost.label)
                else:
                    number = ranks.index(lost)
                    ranks[number] = children.spawn(lost.label, words, job.worker(number))
                return True

            failed = _first_failure(children, ranks, servers, job.least, start_again, scheduler)
            alone = job.least is not None and scheduler is not None and bool(scheduler.child.status)
            failed_late = _let_end(children, grace)
            if not alone:  # without the scheduler servers cannot know that the job has ended well
                failed = failed or failed_late
        except Interrupted as interrupted:
            children.stop(interrupted.signum, grace)
            return 128 + interrupted.signum
    if failed is None:
        return 0
    print_error(failed.describe_end(), "it failed first; see its output above")
    return exit_status(failed.status or 0)


@contextmanager
def _folder_for_state(job: LocalJob) -> Iterator[Path | None]:
    """The file of a scheduler that may be started again; None for a job that ends with its scheduler."""
    if job.least is None:
        yield None
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="bps-run-")
    except OSError as error:
        what = f"no folder can be made for the state of the scheduler: {error}"
        raise BpsError(what, "set TMPDIR to a folder that can be written to") from None
    with folder:
        yield Path(folder.name, "scheduler")


def _first_failure(
    children: Children,
    ranks: list[Child],
    servers: list[Child],
    least: int | None,
    start_again: Callable[[Child], bool],
    scheduler: Scheduler | None,
) -> Child | None:
    """Wait until all ranks have ended with 0 (returns None), or a process of the job has failed (returns it).

    The failure of a rank does not count while `least` others are left, nor that of a server while there is another one;
    then it is started again, if that may be. The loss of the scheduler does not count then either. If there is no other
    one, that of a rank does from there on, because no other view can follow, and servers end with the ranks.
    """
    alone = False
    while any(rank.status is None for rank in ranks):
        for child in children.wait():
            if child.status and least and scheduler is not None and child is scheduler.child:
                alone = not scheduler.start_again()
                effect = "the ranks go on without it" if alone else "it is started again"
                print(f"{child.describe_end()}; {effect}", file=sys.stderr, flush=True)
                continue
            if alone and child not in ranks:
                continue
            if not child.status:
                continue
            kind, alike, needed = ("rank", ranks, least) if child in ranks else ("server", servers, least and 1)
            left = sum(1 for one in alike if not one.status)
            if alone or needed is None or left < needed:
                return child
            again = ", and it is started again" if start_again(child) else ""
            those = f"{left} {kind}{'' if left == 1 else 's'}"
            print(f"{child.describe_end()}; the job goes on with {those}{again}", file=sys.stderr, flush=True)
    return None


def _let_end(children: Children, grace: float) -> Child | None:
    """Wait `grace` seconds for the rest, then stop it; returns the first process that failed meanwhile."""
    failed: Child | None = None
    deadline = time.monotonic() + grace
    while children.running and (left := deadline - time.monotonic()) > 0:
        for child in children.wait(left):
            failed = failed or (child if child.status else None)
    if children.running:
        children.stop(signal.SIGTERM, grace)
    return failed

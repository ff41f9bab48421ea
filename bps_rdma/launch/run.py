# SPDX-License-Identifier: Apache-2.0
"""`bps run`: runs a command as several ranks on this machine, with a scheduler and servers if they are needed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import LocalJob, outer_environment
from bps_rdma.launch.pools import PoolName, lent_to
from bps_rdma.launch.process import Child, Children, Parent, exit_status
from bps_rdma.terminal import print_error
from bps_rdma.tools.inspection import local


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

    children: Parent
    to: Sequence[Child] = ()

    def __call__(self, signum: int, _: FrameType | None) -> None:
        """The signal handler."""
        self.children.pass_on(self.to, signum)


@contextmanager
def signals_pass_on(children: Parent) -> Iterator[PassOn]:
    """Pass SIGUSR1 and SIGUSR2 on, by which a cluster warns a job that its time is over (sbatch --signal).

    Only the ranks get them: the processes that a rank has started would be killed.
    """
    pass_on = PassOn(children)
    before = {n: signal.signal(n, pass_on) for n in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield pass_on
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# A scheduler that is lost so often does not fail by accident.
MOST_SCHEDULERS = 10
SCHEDULERS_WITHIN = 60.0  # seconds
# Statuses of bps-scheduler with which another one may take its place: it was stopped for so long that the job may have
# gone on without it, and somebody has ended it before the job was over.
STEPPED_DOWN = 75
TERMINATED = 128 + signal.SIGTERM
GRACE_S = 3.0  # for processes to end by themselves
_LOOK_S = 0.2  # between two looks at ranks that come too late; and for what is told late


@dataclass
class Scheduler:
    """The scheduler of a job that has one of its own. When it is lost, and ranks can be, another one takes its place.

    Attributes:
        children: the launcher's.
        job: what it is the scheduler of.
        state: the file by which the next one knows the job; None: there is none.
    """

    children: Parent
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
        command = self.job.placed("scheduler", [self.job.binary("bps-scheduler")])
        self.child = self.children.spawn("scheduler", command, environment)

    def start_again(self) -> bool:
        """Starts a lost scheduler again, unless that is of no use; returns whether it did."""
        status = self.child.status or 0
        recent = [start for start in self._starts if start > time.monotonic() - SCHEDULERS_WITHIN]
        if not self.children.has_place("scheduler"):
            return False
        if (status > 0 and status not in (STEPPED_DOWN, TERMINATED)) or len(recent) >= MOST_SCHEDULERS:
            return False
        self._start()
        return True


@dataclass
class Members:
    """The ranks and dedicated servers of a job. Lost ones are started again, `restarts` times altogether."""

    children: Parent
    job: LocalJob
    command: list[str]
    ranks: list[Child]
    servers: list[Child]
    scheduler: Scheduler | None
    restarts: int
    _came_again: list[Child] = field(default_factory=list)

    @property
    def job_is_over(self) -> bool:
        """Returns whether all ranks have left the job; their processes may still run."""
        return self.scheduler is not None and self.scheduler.child.status == 0

    def start_again(self, lost: Child) -> bool:
        """Starts a lost rank or server again in its old place, if that may be; returns whether it did."""
        if self.restarts == 0 or self.job_is_over:
            return False
        is_server = lost in self.servers
        number = (self.servers if is_server else self.ranks).index(lost)
        label = f"server {number}" if is_server else self.job.label(number)
        if not self.children.has_place(label):
            return False
        self.restarts -= 1
        if is_server:
            self.servers[number] = _spawn_server(self.children, self.job, label)
            return True
        again = _spawn_rank(self.children, self.job, number, self.command)
        self.ranks[number] = again
        self._came_again.append(again)
        return True

    def wait(self) -> list[Child]:
        """Wait until children have ended, and return those: first what was killed, then what may have ended for that.

        The kernel closes the connections of a process that is killed before it tells us of its end. So others may end
        for that loss, and be seen, before it.
        """
        ended = self._wait()
        if self.scheduler is not None and self.scheduler.child in ended:
            ended += self.children.wait(_LOOK_S)
        return sorted(ended, key=lambda child: ((child.status or 0) >= 0, child not in self.servers + self.ranks))

    def _wait(self) -> list[Child]:
        while True:
            late = self.job_is_over and any(child.status is None for child in self._came_again)
            ended = self.children.wait(_LOOK_S if late else None)
            if late:
                self._end_late()
            if ended or not any(child.status is None for child in self.ranks):
                return ended

    def _end_late(self) -> None:
        """End ranks that were started again and look for the job, which is over, up to BPS_JOIN_TIMEOUT.

        The scheduler has ended when everybody had closed the connection to it.
        """
        for child in self.children.end_late(self._came_again, looking_for_jobs):
            print(f"{child.label} (pid {child.pid}) was started again too late: the job is over; it is ended",
                  file=sys.stderr, flush=True)  # fmt: skip


def looking_for_jobs() -> set[int]:
    """The process groups of this host that look for a job.

    Who is in a job still, or again, by the socket that it is asked by, tries to join.
    """
    found = set()
    for process in local.find():
        if process.is_ours and local.is_listening(process):
            with contextlib.suppress(ProcessLookupError):
                found.add(os.getpgid(process.pid))
    return found


def spawn_helpers(children: Parent, job: LocalJob, state: Path | None = None) -> Scheduler | None:
    """Start the scheduler and the dedicated servers of `job`, if it has any. Raises BpsError without binaries."""
    if not job.dedicated and job.least is None:
        return None
    scheduler = Scheduler(children, job, state)
    for index in range(job.servers or 0):
        _spawn_server(children, job, f"server {index}")
    return scheduler


def _spawn_server(children: Parent, job: LocalJob, label: str) -> Child:
    return children.spawn(label, job.placed(label, [job.binary("bps-server")]), job.role(label))


def _spawn_rank(children: Parent, job: LocalJob, number: int, command: list[str]) -> Child:
    label = job.label(number)
    return children.spawn(label, job.placed(label, command), job.worker(number))


def run_job(
    job: LocalJob,
    command: Sequence[str],
    *,
    prefixed: bool = False,
    grace: float = GRACE_S,
    restarts: int = 0,
    pools: Sequence[PoolName] = (),
) -> int:
    """Run `command` as every worker of `job`; returns the exit status for the shell.

    Each of `pools` is asked for a server for it.

    The status is 0 if all ranks ended with 0, or those that are left of a job that goes on without the others.
    Otherwise it is that of the first process that failed; the other processes then have `grace` seconds to end by
    themselves (they learn of the loss within 2 seconds), and as many again after SIGTERM, before SIGKILL. In a job that
    goes on without lost ranks and servers these are started again, `restarts` times altogether. In such a job another
    scheduler takes the place of one that is lost. If there are too many of that, the job goes on without one, as long
    as no rank fails: the ranks decide what they still need it for.
    """
    with (
        signals_raise(),
        lent_to(job.name, pools, outer_environment()) as lent,
        Children(prefixed=prefixed) as children,
        _folder_for_state(job, children) as state,
    ):
        job = lent.given_to(job)
        lent.begin(job, outer_environment())
        failed, status = supervise(children, job, words_of(command), state, grace=grace, restarts=restarts)
        if failed is not None or status:
            lent.end()
    return told(failed, status)


def words_of(command: Sequence[str]) -> list[str]:
    """The command with the interpreter in front, where it is a script in Python."""
    return [sys.executable, *command] if command[0].endswith(".py") else list(command)


def told(failed: Child | None, status: int) -> int:
    """Say which process failed first, if one did; returns the exit status."""
    if failed is None:
        return status
    print_error(failed.describe_end(), "it failed first; see its output above")
    return exit_status(failed.status or 0)


def supervise(
    children: Parent, job: LocalJob, words: list[str], state: Path | None, *, grace: float, restarts: int
) -> tuple[Child | None, int]:
    """Start the members of `job`, and wait for their ends, as run_job() says.

    Returns:
        The process that failed first, or None, and the exit status in that case.
    """
    with signals_pass_on(children) as pass_on:
        try:
            scheduler = spawn_helpers(children, job, state)
            servers = [child for child in children.running if scheduler is not None and child is not scheduler.child]
            ranks = [_spawn_rank(children, job, rank, words) for rank in range(job.workers)]
            pass_on.to = ranks
            members = Members(children, job, words, ranks, servers, scheduler, restarts)
            failed = _first_failure(members)
            alone = job.least is not None and scheduler is not None and bool(scheduler.child.status)
            failed_late = _let_end(children, grace)
            if not alone:  # without the scheduler servers cannot know that the job has ended well
                failed = failed or failed_late
        except Interrupted as interrupted:
            children.stop(interrupted.signum, grace)
            return None, 128 + interrupted.signum
    return failed, 0


@contextmanager
def _folder_for_state(job: LocalJob, children: Children) -> Iterator[Path | None]:
    """The file of a scheduler that may be started again; None for a job that ends with its scheduler.

    The folder is removed when the launcher is killed, too.
    """
    if job.least is None:
        yield None
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="bps-run-")
    except OSError as error:
        what = f"no folder can be made for the state of the scheduler: {error}"
        raise BpsError(what, "set TMPDIR to a folder that can be written to") from None
    with folder:
        children.remove_if_killed(folder.name)
        yield Path(folder.name, "scheduler")


def _first_failure(members: Members) -> Child | None:
    """Wait until all ranks have ended with 0 (returns None), or a process of the job has failed (returns it).

    The failure of a rank does not count while so many others are left as the job needs, nor that of a server while
    there is another one; then it is started again, if that may be. The loss of the scheduler does not count then
    either. If there is no other one, that of a rank does from there on, because no other view can follow, and servers
    end with the ranks.
    """
    least, ranks, scheduler = members.job.least, members.ranks, members.scheduler
    alone = False
    while any(rank.status is None for rank in ranks):
        for child in members.wait():
            if child.status and least and scheduler is not None and child is scheduler.child:
                alone = not scheduler.start_again()
                effect = "the ranks go on without it" if alone else "it is started again"
                print(f"{child.describe_end()}; {effect}", file=sys.stderr, flush=True)
                continue
            if alone and child not in ranks:
                continue
            if not child.status:
                continue
            kind, alike, needed = ("rank", ranks, least) if child in ranks else ("server", members.servers, least and 1)
            left = sum(1 for one in alike if not one.status) + (members.job.lent if kind == "server" else 0)
            if alone or needed is None or left < needed:
                return child
            again = ", and it is started again" if members.start_again(child) else ""
            those = f"{left} {kind}{'' if left == 1 else 's'}"
            goes_on = "is over," if members.job_is_over else "goes on"  # the others may end before the kernel tells us
            print(f"{child.describe_end()}; the job {goes_on} with {those}{again}", file=sys.stderr, flush=True)
    return None


def _let_end(children: Parent, grace: float) -> Child | None:
    """Wait `grace` seconds for the rest, then stop it; returns the first process that failed meanwhile."""
    failed: Child | None = None
    deadline = time.monotonic() + grace
    while children.running and (left := deadline - time.monotonic()) > 0:
        for child in children.wait(left):
            failed = failed or (child if child.status else None)
    if children.running:
        children.stop(signal.SIGTERM, grace)
    return failed

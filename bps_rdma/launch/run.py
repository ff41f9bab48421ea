# SPDX-License-Identifier: Apache-2.0
"""`bps run`: runs a command as several ranks on this machine, with a scheduler and servers if they are needed."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

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
                with contextlib.suppress(ProcessLookupError):  # a zombie; it is reported soon
                    signal.pidfd_send_signal(child.pidfd, signum)


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


def spawn_helpers(children: Children, job: LocalJob) -> list[Child]:
    """Start the scheduler and the dedicated servers of `job`, if it has any. Raises BpsError without binaries."""
    if job.servers is None and job.least is None:
        return []
    labels = ["scheduler"] + [f"server {index}" for index in range(job.servers or 0)]
    binaries = [find_binary(f"bps-{label.split()[0]}") for label in labels]
    return [
        children.spawn(label, job.placed(label, [binary]), job.role(label))
        for label, binary in zip(labels, binaries, strict=True)
    ]


def run_job(
    job: LocalJob, command: Sequence[str], *, prefixed: bool = False, grace: float = 3.0, restarts: int = 0
) -> int:
    """Run `command` as every worker of `job`; returns the exit status for the shell.

    The status is 0 if all ranks ended with 0, or those that are left of a job that goes on without the others.
    Otherwise it is that of the first process that failed; the other processes then have `grace` seconds to end by
    themselves (they learn of the loss within 2 seconds), and as many again after SIGTERM, before SIGKILL. In a job that
    goes on without lost ranks they are started again, `restarts` times altogether. Such a job also goes on without its
    scheduler, as long as no rank fails: the ranks decide what they still need it for.
    """
    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    with signals_raise(), signals_pass_on() as pass_on, Children(prefixed=prefixed) as children:
        try:
            helpers = spawn_helpers(children, job)
            ranks = [children.spawn(job.label(rank), words, job.worker(rank)) for rank in range(job.workers)]
            pass_on.to = ranks

            def start_again(rank: Child) -> bool:
                nonlocal restarts
                restarts -= 1
                if restarts < 0:
                    return False
                number = ranks.index(rank)
                ranks[number] = children.spawn(rank.label, words, job.worker(number))
                return True

            failed = _first_failure(children, ranks, job.least, start_again)
            alone = job.least is not None and bool(helpers[0].status)
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


def _first_failure(
    children: Children, ranks: list[Child], least: int | None, start_again: Callable[[Child], bool]
) -> Child | None:
    """Wait until all ranks have ended with 0 (returns None), or a process of the job has failed (returns it).

    The failure of a rank does not count while `least` others are left; then it is started again, if that may be. The
    loss of the scheduler does not count then either; but from there on that of a rank does, because no other view can
    follow, and servers end with the ranks.
    """
    alone = False
    while any(rank.status is None for rank in ranks):
        for child in children.wait():
            if child.status and least and child.label == "scheduler":
                alone = True
                print(f"{child.describe_end()}; the ranks go on without it", file=sys.stderr, flush=True)
                continue
            if alone and child not in ranks:
                continue
            if alone and child.status:
                return child
            left = sum(1 for rank in ranks if not rank.status)
            if child.status and (child not in ranks or left < (least or len(ranks))):
                return child
            if child.status:
                ranks_left = f"{left} rank" + ("" if left == 1 else "s")
                again = ", and it is started again" if start_again(child) else ""
                print(f"{child.describe_end()}; the job goes on with {ranks_left}{again}", file=sys.stderr, flush=True)
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

# SPDX-License-Identifier: Apache-2.0
"""The life of this process in a job: joining it, leaving it, and what it says of both."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from bps_rdma import _core, argument_types, presence, stacks, startup, staying, views
from bps_rdma.errors import BpsError, NotInitializedError
from bps_rdma.group import Group
from bps_rdma.launch import cluster
from bps_rdma.presence import Stage, raised
from bps_rdma.running_job import Job
from bps_rdma.settings import SettingValue, config_with, naming_what_is_no_text, table_of
from bps_rdma.unfinished import Unfinished, disown_dropped
from bps_rdma.views import asked, current, resume, surviving

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bps_rdma.setting_types import Settings

T = TypeVar("T")


__all__ = [
    "Membership", "asked", "config", "current", "depart", "init", "is_initialized", "join", "leave", "local_rank",
    "local_size", "raised", "rank", "report_exception", "resume", "shutdown", "size", "surviving",
]  # fmt: skip


class Membership:
    """What init() returns: `with init(...):` leaves the job at the end of the block.

    An exception that leaves the block is told to the other ranks, which do not wait for this one then. If the process
    was in the job before, that init() had no effect, and neither has the end of the block.
    """

    def __init__(self, joined: bool) -> None:
        self._joined = joined

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        """Leaves the job."""
        if not self._joined:
            return
        if value is None or isinstance(value, SystemExit):
            shutdown()
        else:
            report_exception(value)
            with contextlib.suppress(BpsError):  # the exception itself must be seen
                shutdown(0.0)


def init(**settings: Unpack[Settings]) -> Membership:
    """Joins the job; starts the members that are not running yet. Further calls have no effect while the job runs.

    Args:
        settings: values that override the environment, named without `BPS_` and in lower case, for example
            `init(transport="tcp", partition_bytes=1 << 20)`. `config()` lists them.

    Returns:
        An object for a `with` statement, which leaves the job at the end of its block.

    Raises:
        InvalidArgumentError: a setting or launcher variable cannot be used.
        UnreachableError, AuthenticationError, VersionError, PortTakenError: the connection to the scheduler or a server
            failed.
        DeadlineError: not all members joined within BPS_JOIN_TIMEOUT seconds.
        NotInitializedError: shutdown() was called meanwhile, by another thread or a signal handler.
    """
    return join(settings, resumes=False)


def join(settings: Mapping[str, object], *, resumes: bool) -> Membership:
    """Implements init(). `resumes`: this process has suspended the job and has its state; other processes are late."""
    change = presence.begin_change(ends_init=False)
    if change is None:
        raise NotInitializedError(
            "init() was called by a signal handler that interrupted init() or shutdown()",
            "call init() when the handler has returned",
        )
    try:
        if is_initialized():
            return Membership(joined=False)
        cluster.adopt(os.environ, settings)
        with naming_what_is_no_text():
            config = config_with(settings)
            start = startup.from_config(config)
            _warn_of_agent(config)
            start.resumes = resumes
            process = _core.Process.start(config, start, change.stop)
        job = Job(process, config, Group(0, tuple(range(process.workers))))
        presence.become(Stage.INSIDE, views.settled(job, change))
        atexit.register(shutdown)
        _report_exceptions()
        _tell_on_signal()
        return Membership(joined=True)
    finally:
        presence.end_change(change)


def _warn_of_agent(config: _core.Config) -> None:
    """Warns that torchrun's agent ends all ranks when one is lost: none is left for the job to go on with."""
    agent = os.environ.get("TORCHELASTIC_RUN_ID") and config.text("BPS_LOCAL_RANK") in ("", "0")
    if agent and config.integer("BPS_MIN_WORKERS") > 0:
        warnings.warn(
            f"BPS_MIN_WORKERS={config.text('BPS_MIN_WORKERS')} does not help under torchrun: when a rank is lost, its "
            "agent ends all others; start the job with `bps run --min-np`, or do without BPS_MIN_WORKERS",
            RuntimeWarning,
            stacklevel=4,
        )


def _tell_on_signal() -> None:
    """Lets SIGUSR1 show the stacks of all threads, and then, by the native module, what this rank waits for."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # Python's handler; the native module looks at the system's
        faulthandler.register(signal.SIGUSR1, file=2, chain=True)
    stacks.show()


def shutdown(timeout: float | None = None) -> None:
    """Leaves the job once all workers do, or after a while. Without a job it has no effect.

    Args:
        timeout: seconds to wait for the other workers. 0 leaves at once; ranks that still need this one then lose it.
            Default: BPS_SHUTDOWN_TIMEOUT.

    Operations whose handles were dropped are finished first, in the main thread, and without a `timeout` the updates
    that a CrossBarrier of this thread has still to make; nothing is while an exception is handled. An init() that is in
    progress ends with NotInitializedError, and so do calls of other threads that still wait.
    """
    argument_types.explain(timeout=timeout)
    leave(timeout)


def depart(with_it: object = None) -> None:
    """Leaves the job without waiting for the others, which may go on among themselves.

    Servers of this process, and the scheduler if it is here, stay until all others have left, but at the end of the
    process for BPS_SHUTDOWN_TIMEOUT seconds at most.

    Args:
        with_it: an object that the others need, too; it is kept as long.
    """

    def end(job: Job, seconds: float) -> None:
        try:
            job.process.depart(seconds)
        finally:
            staying.stay(job.process, seconds, with_it)

    try:
        _finish_late()
    finally:
        _leave(None, end)


def leave(timeout: float | None, *, suspends: bool = False) -> None:
    """Implements shutdown(). `suspends`: workers are going to come back, and dedicated servers wait for them."""
    began = time.monotonic()
    try:
        if timeout is None:
            _finish_late()
            began = time.monotonic()
        if (job := presence.inside) is not None:
            timeout = job.config.seconds("BPS_SHUTDOWN_TIMEOUT") if timeout is None else timeout
            if timeout > 0:
                job.part(Unfinished).finish_dropped(timeout)
    finally:
        if timeout is not None and timeout > 0:  # 0 would mean at once
            timeout = max(timeout - (time.monotonic() - began), 0.001)
        _leave(timeout, lambda job, seconds: job.process.shutdown(seconds, suspends))


def _finish_late() -> None:
    if presence.inside is not None:
        presence.inside.part(Unfinished).finish_late()


def _leave(timeout: float | None, end: Callable[[Job, float], object]) -> None:
    change = presence.begin_change(ends_init=True)
    if change is None:
        return  # a signal handler: what it has interrupted ends by itself
    try:
        job = presence.now().job
        presence.become(Stage.OUT)
        if job is None:
            return
        atexit.unregister(shutdown)
        try:
            end(job, job.config.seconds("BPS_SHUTDOWN_TIMEOUT") if timeout is None else timeout)
        finally:
            job.close()
            stacks.hide()
            # When it is down no peer can write into them any more.
            _core.release_orphans(all=job.process.is_down)
    finally:
        presence.end_change(change)


_previous_excepthook: Any = None


def _report_exceptions() -> None:
    """Makes an exception that ends this process known to the other ranks, which otherwise would wait for it."""
    global _previous_excepthook
    if _previous_excepthook is None:
        _previous_excepthook, sys.excepthook = sys.excepthook, _excepthook


def _excepthook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    report_exception(value)
    job = presence.now().job
    if job is not None and isinstance(value, BpsError):  # the tracebacks of several ranks are long, and mix
        with contextlib.suppress(Exception):
            sys.stderr.write(f"error: rank {job.process.rank} ends with {kind.__name__}: {value}\n")
    _previous_excepthook(kind, value, trace)


def report_exception(value: BaseException) -> None:
    """Tells the other ranks that this one ends with an exception, so that they do not wait for it; never raises.

    Without a job it has no effect. An exception that ends the process is reported by itself; this is for callers in
    whose process the exception ends something else, such as a task of an actor.
    """
    job = presence.now().job
    if job is not None:
        with contextlib.suppress(BaseException):  # the exception itself must be shown, even if this fails
            job.part(Unfinished).give_up()
            job.process.abort("".join(traceback.format_exception_only(value)).strip()[:_LONGEST_REPORT])


_LONGEST_REPORT = 2000  # characters


def _after_fork_in_child() -> None:
    if presence.now().job is not None:
        disown_dropped()
    presence.after_fork()
    atexit.unregister(shutdown)


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_initialized() -> bool:
    """Returns whether this process is in a job."""
    return presence.now().job is not None


def rank() -> int:
    """Rank of this worker, from 0."""
    return asked(lambda process: process.rank)


Group._own_rank = staticmethod(rank)
Group._go_on = staticmethod(views.go_on)


def size() -> int:
    """Number of workers."""
    return current().world.size


def local_rank() -> int:
    """Rank of this worker on its host, as set by the launcher; 0 without a launcher. Can be called without a job."""
    return int(_settings().text("BPS_LOCAL_RANK") or 0)


def local_size() -> int:
    """Number of workers on this host, as set by the launcher; 1 without a launcher. Can be called without a job."""
    return int(_settings().text("BPS_LOCAL_SIZE") or 1)


def _settings() -> _core.Config:
    if (job := presence.now().job) is not None:
        return job.config
    config = _core.Config()
    if (place := cluster.place_of(os.environ)) is not None:
        ranks = {"RANK": place.rank, "WORLD_SIZE": place.size}
        on_host = {"LOCAL_RANK": place.local_rank, "LOCAL_SIZE": place.local_size}
        for name, value in [*ranks.items(), *on_host.items()]:
            if value is not None and config.source(f"BPS_{name}") == "default":
                config.set(f"BPS_{name}", str(value), place.launcher)
    return config


def config() -> list[SettingValue]:
    """Every setting with its value and the source of the value. Can be called before init().

    The value of a secret is only "set" or "unset".
    """
    return table_of(_settings())

# SPDX-License-Identifier: Apache-2.0
"""The job of this process: joining and leaving it, and going from one view to the next."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from bps_rdma import _core, stacks, startup, staying
from bps_rdma.errors import BpsError, NotInitializedError, RoundAbortedError
from bps_rdma.group import Group
from bps_rdma.kept_errors import keeping
from bps_rdma.launch import cluster
from bps_rdma.running_job import Job
from bps_rdma.settings import SettingValue, config_with, table_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bps_rdma.setting_types import Settings

T = TypeVar("T")


class _Change:
    """An init() or shutdown() in progress: there is one at a time.

    Other threads wait for its end. A signal handler that has interrupted it cannot.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.stop = _core.Stop()
        self.over = threading.Event()


_job: Job | None = None
_ended: Job | None = None  # its view has ended, and the next call goes on in the next one
_is_told = True  # the caller knows that, and not only a thread of the library
_untold: RoundAbortedError | None = None  # what the caller does not know, although _job is in the next view already
_change: _Change | None = None
_lock = threading.RLock()  # guards _change, for moments; a signal handler may interrupt its holder
_of_parent: list[Job] = []  # jobs of the process that this one was forked from, kept so that they are never destroyed


def current() -> Job:
    """The job of this process."""
    if _job is None or _untold is not None:
        return _renewed()
    return _job


def _known() -> Job | None:
    """The job of this process, in its present view or in one that has ended."""
    ended = _ended  # is read first: a thread that goes into the next view sets _job before it clears this
    return _job or ended


# ---- Life


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
    global _job
    change = _begin_change(ends_init=False)
    if change is None:
        raise NotInitializedError(
            "init() was called by a signal handler that interrupted init() or shutdown()",
            "call init() when the handler has returned",
        )
    try:
        if _job is not None or _ended is not None:
            return Membership(joined=False)
        cluster.adopt(os.environ, settings)
        config = config_with(settings)
        start = startup.from_config(config)
        _warn_of_agent(config)
        start.resumes = resumes
        process = _core.Process.start(config, start, change.stop)
        _job = _settled(Job(process, config, Group(0, tuple(range(process.workers)))), change)
        atexit.register(shutdown)
        _report_exceptions()
        _tell_on_signal()
        return Membership(joined=True)
    finally:
        _end_change(change)


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

    An init() that is in progress ends with NotInitializedError, and so do calls of other threads that still wait.
    """
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

    _leave(None, end)


def leave(timeout: float | None, *, suspends: bool = False) -> None:
    """Implements shutdown(). `suspends`: workers are going to come back, and dedicated servers wait for them."""
    _leave(timeout, lambda job, seconds: job.process.shutdown(seconds, suspends))


def _leave(timeout: float | None, end: Callable[[Job, float], object]) -> None:
    global _job, _ended, _untold
    change = _begin_change(ends_init=True)
    if change is None:
        return  # a signal handler: what it has interrupted ends by itself
    try:
        job, _job, _ended, _untold = _known(), None, None, None
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
        _end_change(change)


# ---- From one view to the next

_REPEAT = "repeat the step"


def raised(error: BaseException) -> BaseException:
    """Returns an error that was kept, which the caller is about to raise: see kept_errors.py."""
    global _untold
    if isinstance(error, RoundAbortedError) and not keeping:
        _untold = None
        note_view_end()
    return error


def _note_view_end() -> None:
    """Called for each RoundAbortedError of the core. One that is kept tells the caller nothing yet."""
    if not keeping:
        note_view_end()


def note_view_end() -> None:
    """Notes that this process knows the end of its view: a RoundAbortedError is about to be raised."""
    global _job, _ended, _is_told
    with _lock:
        if _job is not None and _job.process.view_ended:
            _ended, _job, _is_told = _job, None, not keeping
        elif _job is None and not keeping:
            _is_told = True


def _renewed() -> Job:
    """Returns the job in its next view. It may have to wait there until all other ranks come.

    Raises:
        RoundAbortedError: a thread of the library has gone there before the caller knew; or this is one, and must not.
    """
    global _untold
    ended = _ended  # first, as in _known()
    with _lock:
        if _job is not None:
            if keeping or _untold is None:
                return _job
            error, _untold = _untold, None
            raise error
    if ended is None:
        raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
    if keeping and not ended.process.survives_servers:
        raise RoundAbortedError("the view has ended", _REPEAT)
    change = _begin_change(ends_init=False)
    if change is None:
        raise NotInitializedError(
            "a signal handler has interrupted the change to the next view", "use bps_rdma when the handler has returned"
        )
    try:
        if _job is None:  # otherwise another thread was faster
            _go_on(change)
    finally:
        _end_change(change)
    return current()


def _go_on(change: _Change) -> None:
    """Takes this process into its next view."""
    global _job, _ended, _untold
    ended = _ended
    if ended is None:
        raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
    try:
        job = _settled(_next_view(ended, change), change)
        if not (_is_told or job.goes_on):
            _untold = RoundAbortedError("a member was lost or has entered, and the view has ended", _REPEAT)
        _job = job
    finally:
        if _ended is ended:  # until here other threads wait for this one
            _ended = None
        if _job is None:  # it is in no job any more, and shutdown() has nothing to do
            stacks.hide()


def _settled(job: Job, change: _Change) -> Job:
    """Returns the job, or that of a later view, once all its ranks know how they go on."""
    while True:
        try:
            job.go_on()
            return job
        except RoundAbortedError:  # another member was lost meanwhile
            job = _next_view(job, change)
        except BaseException:  # nobody can use it, and what it has begun must not write any more
            with contextlib.suppress(BpsError):
                job.process.shutdown(0.0)
            raise


def _next_view(before: Job, change: _Change) -> Job:
    """Returns the job in the view that follows one that has ended; go_on() must follow."""
    kept = before.take_lasting_parts()
    goes_on = False
    try:
        process = _core.Process.renew(before.process, change.stop)
        interrupted = before.take_interrupted()
        # Other views may have begun and ended meanwhile, without this process.
        old_ranks = {identity: rank for rank, identity in enumerate(before.identities)}
        ranks = {old_ranks[identity]: new for new, identity in enumerate(process.identities) if identity in old_ranks}
        has_same_workers = process.workers == len(ranks) == before.world.size
        goes_on = has_same_workers and process.survives_servers and before.process.can_go_on
        if goes_on:
            kept.update(before._parts)
            before._parts = {}
    finally:
        before.close()
        _core.release_orphans(all=before.process.is_down and not goes_on)
    job = Job(process, before.config, Group(0, tuple(range(process.workers))))
    job.is_late = before.is_late
    job._parts.update(kept)
    was_compressed = {before.numbering.name_of(one): one.compression for one in before.tensors.values()}
    job.compressed = before.compressed | {name: text for name, text in was_compressed.items() if text}
    for key, group, members in before.all_groups():
        job.lost_groups.append((key, group, tuple(ranks[rank] for rank in members if rank in ranks)))
    if goes_on:
        job.goes_on = True
        job.epoch = before.epoch
        job.interrupted, job.failed = interrupted, before.failed
        job.views = before.views | job.views
        job.numbering.next = before.next_rounds()
    else:
        for each in interrupted:
            each.operation.abort()
    return job


def resume() -> bool:
    """Goes into the next view after the end of one. Returns False if operations under way cannot go on there."""
    job = _known()
    if job is None or not job.process.survives_servers:
        _note_view_end()
        return False
    note_view_end()
    return current().goes_on


def asked(call: Callable[[_core.Process], T]) -> T:
    """Returns what `call` reads from this process, in the view that the process is in by then."""
    while True:
        process = current().process
        try:
            return call(process)
        except RoundAbortedError:  # another thread goes into the next view
            note_view_end()


def rebound(process: _core.Process, tensor: _core.Tensor) -> tuple[_core.Process, _core.Tensor] | None:
    """Finds what a prepared operation works on in the next view. None: the job has ended, or has other workers."""
    note_view_end()
    if not is_initialized():
        return None
    job = current()
    keys = job.views.get(id(process))
    if keys is None or job.process is process:
        return None
    number = job.numbering.number_of(keys[tensor.group])
    found = job.tensors.get((number, tensor.name))
    if found is None:
        declared = (number, tensor.name, tensor.dtype, tensor.elements, tensor.shape, tensor.compression)
        found = job.declare([declared])[0]
    return job.process, found


_core.register_view_hooks(note_view_end=_note_view_end, resume=resume, rebound=rebound)


def surviving(call: Callable[[], T]) -> T:
    """Repeats a call if only servers were lost. The call must have no effect when it raises RoundAbortedError."""
    while True:
        try:
            return call()
        except RoundAbortedError:
            if not resume():
                raise


def _begin_change(*, ends_init: bool) -> _Change | None:
    """Waits until no other thread is in init() or shutdown(). None: this thread itself is, in a signal handler."""
    global _change
    while True:
        with _lock:
            running = _change
            if running is None:
                _change = mine = _Change()
                return mine
        if ends_init:
            running.stop.request()
        if running.thread == threading.get_ident():
            return None
        running.over.wait()


def _end_change(change: _Change) -> None:
    global _change
    _change = None
    change.over.set()


_previous_excepthook: Any = None


def _report_exceptions() -> None:
    """Makes an exception that ends this process known to the other ranks, which otherwise would wait for it."""
    global _previous_excepthook
    if _previous_excepthook is None:
        _previous_excepthook, sys.excepthook = sys.excepthook, _excepthook


def _excepthook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    report_exception(value)
    job = _known()
    if job is not None and isinstance(value, BpsError):  # the tracebacks of several ranks are long, and mix
        with contextlib.suppress(Exception):
            sys.stderr.write(f"error: rank {job.process.rank} ends with {kind.__name__}: {value}\n")
    _previous_excepthook(kind, value, trace)


def report_exception(value: BaseException) -> None:
    """Tells the other ranks that this one ends with an exception, so that they do not wait for it; never raises.

    Without a job it has no effect. An exception that ends the process is reported by itself; this is for callers in
    whose process the exception ends something else, such as a task of an actor.
    """
    job = _known()
    if job is not None:
        with contextlib.suppress(BaseException):  # the exception itself must be shown, even if this fails
            job.process.abort("".join(traceback.format_exception_only(value)).strip()[:_LONGEST_REPORT])


_LONGEST_REPORT = 2000  # characters


def _after_fork_in_child() -> None:
    """Forgets the job: a forked process is no member of its parent's job."""
    global _job, _ended, _untold, _change, _lock
    _of_parent.extend(job for job in (_job, _ended) if job is not None)
    _job, _ended, _untold, _change, _lock = None, None, None, None, threading.RLock()
    atexit.unregister(shutdown)


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_initialized() -> bool:
    """Returns whether this process is in a job."""
    return _known() is not None


def rank() -> int:
    """Rank of this worker, from 0."""
    return asked(lambda process: process.rank)


Group._own_rank = staticmethod(rank)


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
    if (job := _known()) is not None:
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

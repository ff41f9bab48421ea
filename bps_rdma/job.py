# SPDX-License-Identifier: Apache-2.0
"""The job of this process: joining and leaving it, its groups, its memory, its counters."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bps_rdma import _core, argument_types, arrays, startup
from bps_rdma.errors import InvalidArgumentError, NotInitializedError, TransportError
from bps_rdma.group import Group
from bps_rdma.launch import cluster

T = TypeVar("T")


@dataclass(frozen=True)
class SettingValue:
    """One setting: see `bps config`."""

    name: str
    value: str
    source: str
    default: str
    aliases: tuple[str, ...]
    help: str


class Job:
    """Everything that lives from init() to shutdown().

    Args:
        process: this process in the core.
        config: the settings that init() used.
        world: the group of all workers.
    """

    def __init__(self, process: _core.Process, config: _core.Config, world: Group) -> None:
        self.process = process
        self.config = config
        self.world = world
        self.groups: dict[int, Group] = {0: world}
        self.tensors: dict[tuple[int, str], _core.Tensor] = {}
        self.epoch = process.epoch  # of the view
        # It has entered a job that was running, whose state it has to get from the others.
        self.is_late = self.epoch > 1 and process.ranks_before[process.rank] < 0
        self.may_lose_members = config.integer("BPS_MIN_WORKERS") > 0
        self.window_start = time.monotonic()
        self.window_bytes = 0
        self._parts: dict[type[Any], Any] = {}
        self._making = threading.RLock()

    def part(self, kind: type[T]) -> T:
        """The one object of this class that belongs to the job: made at first use, and closed when the job ends.

        Faces keep their state here instead of in module globals, so that two jobs of one process share nothing.

        Args:
            kind: called without arguments; if its objects have a method close(), it is called after shutdown(). When
                a view ends they are closed and made anew, unless the class has a true `outlives_view`.
        """
        found: T | None = self._parts.get(kind)
        if found is None:
            with self._making:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = kind()
        return found

    def close(self) -> None:
        """Ends all parts; called when none of the job's operations is in progress any more."""
        while self._parts:
            _, part = self._parts.popitem()
            if hasattr(part, "close"):
                part.close()


class _Change:
    """An init() or shutdown() in progress: there is one at a time.

    Other threads wait for its end. A signal handler that has interrupted it cannot.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.stop = _core.Stop()
        self.over = threading.Event()


_job: Job | None = None
_ended: Job | None = None  # its view has ended, which this process has been told; the next call goes on in the next one
_change: _Change | None = None
_lock = threading.RLock()  # guards _change, for moments; a signal handler may interrupt its holder
_of_parent: list[Job] = []  # jobs of the process that this one was forked from, kept so that they are never destroyed


def current() -> Job:
    """The job of this process."""
    if _job is None:
        return _renewed()
    return _job


# ---- Life


def init(**settings: object) -> None:
    """Joins the job; starts the members that are not running yet. Further calls have no effect while the job runs.

    Args:
        settings: values that override the environment, named without BPS_ and in lower case, for example
            `init(transport="tcp", partition_bytes=1 << 20)`. `config()` lists them.

    Raises:
        InvalidArgumentError: a setting or launcher variable cannot be used.
        UnreachableError, AuthenticationError, VersionError, PortTakenError: the connection to the scheduler or a server
            failed.
        DeadlineError: not all members joined within BPS_JOIN_TIMEOUT seconds.
        NotInitializedError: shutdown() was called meanwhile, by another thread or a signal handler.
    """
    global _job
    change = _begin_change(ends_init=False)
    if change is None:
        raise NotInitializedError(
            "init() was called by a signal handler that interrupted init() or shutdown()",
            "call init() when the handler has returned",
        )
    try:
        if _job is not None or _ended is not None:
            return
        cluster.adopt(os.environ, settings)
        config = config_with(settings)
        process = _core.Process.start(config, startup.from_config(config), change.stop)
        _job = Job(process, config, Group(0, tuple(range(process.workers))))
        atexit.register(shutdown)
        _report_exceptions()
    finally:
        _end_change(change)


def shutdown() -> None:
    """Leaves the job once all workers do, or after BPS_SHUTDOWN_TIMEOUT seconds. Without a job it has no effect.

    An init() that is in progress ends with NotInitializedError, and so do calls of other threads that still wait.
    """
    global _job, _ended
    change = _begin_change(ends_init=True)
    if change is None:
        return  # a signal handler: what it has interrupted ends by itself
    try:
        job, _job, _ended = _job or _ended, None, None
        if job is None:
            return
        atexit.unregister(shutdown)
        try:
            job.process.shutdown(job.config.seconds("BPS_SHUTDOWN_TIMEOUT"))
        finally:
            job.close()
            # When it is down no peer can write into them any more.
            _core.release_orphans(all=job.process.is_down)
    finally:
        _end_change(change)


# ---- From one view to the next


def note_view_end() -> None:
    """A RoundAbortedError is about to be raised: this process knows now that the view has ended."""
    global _job, _ended
    with _lock:
        if _job is not None and _job.process.view_ended:
            _ended, _job = _job, None


def _renewed() -> Job:
    """The job in its next view, for which it may have to wait until all other ranks come."""
    global _job, _ended
    if _ended is None:
        raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
    change = _begin_change(ends_init=False)
    if change is None:
        raise NotInitializedError(
            "a signal handler has interrupted the change to the next view", "use bps_rdma when the handler has returned"
        )
    try:
        if _job is not None:  # another thread was faster
            return _job
        before, _ended = _ended, None
        if before is None:
            raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
        kept = {kind: before._parts.pop(kind) for kind in list(before._parts) if getattr(kind, "outlives_view", False)}
        try:
            process = _core.Process.renew(before.process, change.stop)
        finally:
            before.close()
            _core.release_orphans(all=before.process.is_down)
        ranks = {old: new for new, old in enumerate(process.ranks_before) if old >= 0}
        world = Group(0, tuple(range(process.workers)))
        job = Job(process, before.config, world)
        job._parts.update(kept)
        for number, group in sorted(before.groups.items()):
            if number != 0:
                members = tuple(ranks[rank] for rank in group.ranks if rank in ranks)
                made = process.new_group(list(members), f"{number} of the view before", process.timeout_s)
                group._become(Group(made, members))
                job.groups[made] = group
        _job = job
        return job
    finally:
        _end_change(change)


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
    _previous_excepthook(kind, value, trace)


def report_exception(value: BaseException) -> None:
    """Tells the other ranks that this one ends with an exception, so that they do not wait for it; never raises.

    Without a job it has no effect. An exception that ends the process is reported by itself; this is for callers in
    whose process the exception ends something else, such as a task of an actor.
    """
    job = _job or _ended
    if job is not None:
        with contextlib.suppress(BaseException):  # whatever goes wrong, the exception itself must be shown
            job.process.abort("".join(traceback.format_exception_only(value)).strip()[:_LONGEST_REPORT])


_LONGEST_REPORT = 2000  # characters


def _after_fork_in_child() -> None:
    """A forked process is no member of its parent's job."""
    global _job, _ended, _change, _lock
    _of_parent.extend(job for job in (_job, _ended) if job is not None)
    _job, _ended, _change, _lock = None, None, None, threading.RLock()
    atexit.unregister(shutdown)


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _job is not None or _ended is not None


def rank() -> int:
    """Rank of this worker, from 0."""
    return current().process.rank


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
    job = _job or _ended
    return job.config if job is not None else _core.Config()


def config_with(settings: Mapping[str, object]) -> Any:
    """The settings that init() uses with these arguments."""
    config = _core.Config()
    for name, value in settings.items():
        text = ("1" if value else "0") if isinstance(value, bool) else str(value)
        config.set(f"BPS_{name.upper()}", text, "argument")
    return config


def config() -> list[SettingValue]:
    """Every setting with its value and the source of the value. Can be called before init().

    The value of a secret is only "set" or "unset".
    """
    values = _settings()
    return [
        SettingValue(name, _shown(values, name, secret), values.source(name), default, tuple(aliases.split()), text)
        for name, aliases, default, text, secret in _core.Config.table()
    ]


def _shown(values: Any, name: str, secret: bool) -> str:
    text: str = values.text(name)
    return ("set" if text else "unset") if secret else text


# ---- Groups and barriers


def new_group(ranks: Iterable[int], name: str = "") -> Group:
    """Creates the group of some worker ranks, or finds it. Only the ranks of the group call this.

    Args:
        ranks: worker ranks, in any order.
        name: distinguishes groups of the same ranks.

    Raises:
        InvalidArgumentError: a rank occurs twice or is out of range, or this rank is not among them.
        DeadlineError: a member did not call it in time. PeerLostError: a member was lost.
    """
    job = current()
    members = _whole_numbers(ranks)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= job.world.size:
        raise InvalidArgumentError(
            f"{members} are not ranks of a world of {job.world.size}", "name each rank once, from 0"
        )
    if job.process.rank not in members:
        raise InvalidArgumentError(
            f"rank {job.process.rank} is not in the group {members}", "call new_group() on its members only"
        )
    try:
        number = job.process.new_group(members, name, job.process.timeout_s)
    except TypeError:
        argument_types.explain(name=name)
        raise
    return job.groups.setdefault(number, Group(number, tuple(members)))


def _whole_numbers(ranks: Iterable[int]) -> list[int]:
    found = [argument_types.whole(rank) for rank in ranks] if isinstance(ranks, Iterable) else [None]
    members = sorted(rank for rank in found if rank is not None)
    if len(members) < len(found):
        raise InvalidArgumentError(f"{ranks!r} are not ranks", "pass a list of whole numbers, as in [0, 1]")
    return members


def barrier(group: Group | None = None, timeout: float | None = None) -> None:
    """Waits until every rank of the group has called it.

    Raises:
        DeadlineError: after `timeout` seconds (default: BPS_TIMEOUT); names the missing ranks.
        PeerLostError: a rank of the group was lost.
    """
    job = current()
    number = group_of(job, group).id
    try:
        job.process.barrier(number, job.process.timeout_s if timeout is None else timeout)
    except TypeError:
        argument_types.explain(timeout=timeout)
        raise


def commit(group: Group | None = None, timeout: float | None = None) -> None:
    """Agrees that a step is complete, in a job that may go on without lost members (BPS_MIN_WORKERS).

    Every rank of the group calls it when it has all results of a step, and before it uses them. When a member is lost
    either all ranks that are left return, or all raise RoundAbortedError and repeat the step: none uses results that
    another one lacks. New processes enter the job when all its workers have called it. Costs a round trip to the
    scheduler; in other jobs it returns at once.

    Raises:
        RoundAbortedError: a member was lost; nobody may use the results of this step.
        DeadlineError, PeerLostError: as barrier().
    """
    job = current()
    if job.may_lose_members:
        job.process.end_step(group_of(job, group).id, job.process.timeout_s if timeout is None else timeout)


def group_of(job: Job, group: Group | None) -> Group:
    """The group that is passed as an argument; None: all workers."""
    if group is None:
        return job.world
    if not isinstance(group, Group) or job.groups.get(group.id) != group:
        raise InvalidArgumentError(f"{group} is not a group of this job", "make it with new_group() after init()")
    return group


# ---- Memory


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """A zeroed numpy array that the other processes of this host can map, so that it is synchronised without copies.

    Args:
        shape: as for numpy.empty.
        dtype: any that push_pull takes: its name, or the dtype of numpy or torch. bfloat16 needs the package
            ml_dtypes.

    A process that is forked, such as a worker of torch's DataLoader, inherits the array as a copy, like other memory:
    what it writes stays its own. Parts that it has not written may show what the parent writes later; pass it a copy if
    that matters. To share an array with child processes, use multiprocessing.shared_memory.

    Raises:
        InvalidArgumentError: `shape` is none.
        InvalidTensorError: `dtype` is not supported.
        TransportError: there is not enough shared memory.
    """
    wanted = arrays.numpy_dtype(dtype)
    extent = argument_types.extent_of(shape)
    count = math.prod(extent)
    nbytes = count * wanted.itemsize
    if nbytes > sys.maxsize:
        raise TransportError(f"cannot create shared memory: {nbytes} bytes are more than any machine has", "use less")
    shared = _core.SharedMemory(max(nbytes, 1))
    view = memoryview(shared)
    array: np.ndarray[Any, Any] = np.frombuffer(view, dtype=wanted, count=count)
    return array.reshape(extent)


# ---- Counters


def metrics() -> dict[str, Any]:
    """Counters of this process since init(): {"total": {name: count}, "transports": [route to each server]}.

    Data-plane and control-plane traffic, copies, stalls and rounds; csrc/core/metrics.h explains each one.
    """
    process = current().process
    return {"total": dict(process.metrics()), "transports": list(process.routes)}


def get_pushpull_speed() -> tuple[int, float]:
    """(milliseconds since the epoch, MB/s of tensors finished since the last call or since init())."""
    job = current()
    now = time.monotonic()
    done = dict(job.process.metrics())["operation_bytes"]
    elapsed = max(now - job.window_start, 1e-9)
    speed = (done - job.window_bytes) / elapsed / 1e6
    job.window_start, job.window_bytes = now, done
    return int(time.time() * 1000), speed

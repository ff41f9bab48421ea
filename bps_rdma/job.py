# SPDX-License-Identifier: Apache-2.0
"""The job of this process: joining and leaving it, its groups, its memory, its counters."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bps_rdma import _core, argument_types, arrays, failover, startup
from bps_rdma.errors import BpsError, InvalidArgumentError, NotInitializedError, RoundAbortedError, TransportError
from bps_rdma.group import Group
from bps_rdma.inspection import stacks
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
        follows: this process was in the view before.
    """

    def __init__(self, process: _core.Process, config: _core.Config, world: Group, *, follows: bool = False) -> None:
        self.process = process
        self.config = config
        self.world = world
        self.groups: dict[int, Group] = {0: world}
        self.tensors: dict[tuple[int, str], _core.Tensor] = {}
        self.epoch = process.epoch  # of the first view with these workers
        # It has entered a job that was running, whose state it has to get from the others.
        self.is_late = self.epoch > 1 and not follows
        self.identities: list[int] = process.identities
        self._compression: str = config.text("BPS_COMPRESSION")
        self._exact: bool = config.text("BPS_EXACT") == "1"
        self.min_compress_bytes: int = config.integer("BPS_MIN_COMPRESS_BYTES")
        self.asynchronous: bool = config.text("BPS_ASYNC") == "1"
        staleness: int = config.integer("BPS_STALENESS")
        self.staleness: int | None = None if staleness < 0 else staleness
        self.may_lose_members = config.integer("BPS_MIN_WORKERS") > 0
        self.goes_on = False  # with everything that was under way in the view before
        self.numbering = failover.Numbering()
        self.interrupted: list[failover.Interrupted] = []  # by the end of an earlier view
        self.repeats: list[failover.Interrupted] = []  # under a name of their own
        self.views = {id(process): self.numbering.keys}  # of the processes whose names can be looked up here
        self.lost_groups: list[tuple[str, Group, tuple[int, ...]]] = []  # key, and ranks; to be made in this view
        self.compressed: dict[failover.Name, str] = {}  # names of earlier views, and how they travelled
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

    def compression(self, dtype: _core.Dtype, elements: int, wanted: str | None) -> str:
        """How a name is to be declared, "" for none, if its caller wants this; None: what the settings say."""
        if wanted == "exact" or (wanted is None and self._exact):
            return "exact" if dtype in arrays.FLOATING else ""  # sums of integers are exact anyway
        if wanted is not None:
            return "" if wanted == "none" else wanted
        if dtype != _core.Dtype.float32 or elements * 4 < self.min_compress_bytes:
            return ""
        return self._compression

    def declare(self, specs: list[tuple[int, str, _core.Dtype, int, str, str]]) -> list[_core.Tensor]:
        """Announces names in this view: (group, name, dtype, elements, shape, compression) each."""
        declared: list[_core.Tensor] = self.process.declare(specs)
        for spec, tensor in zip(specs, declared, strict=True):
            key = spec[0], spec[1]
            with self._making:  # of several threads the first one sets the round, before any of them uses it
                if key not in self.tensors:
                    begun = self.numbering.begun(tensor)
                    if begun:
                        tensor.next_round = begun
                self.tensors[key] = tensor
        return declared

    def add_group(self, key: str, number: int, group: Group) -> None:
        """Notes a group that has been made, under a key that it keeps in all views."""
        self.groups[number] = group
        self.numbering.keys[number] = key

    def all_groups(self) -> list[tuple[str, Group, tuple[int, ...]]]:
        """The groups but the world, with their keys and ranks, in an order that is the same on all their members."""
        made = [
            (self.numbering.keys[number], group, group.ranks) for number, group in self.groups.items() if number != 0
        ]
        return sorted([*made, *self.lost_groups], key=lambda each: each[0])

    def next_rounds(self) -> dict[failover.Name, int]:
        """The first round of each name, counted from init() on, that this rank has not begun."""
        return failover.next_rounds(self.numbering, self.tensors.values())

    def take_interrupted(self) -> list[failover.Interrupted]:
        """What the end of this view has interrupted; the process has been renewed."""
        found = list(self.interrupted)
        for operation in self.process.take_suspended():
            own = [each for each in self.repeats if each.operation is operation]
            found += own or [self.numbering.interrupted(operation)]
        return found

    def go_on(self) -> None:
        """Completes what _next_view() has begun, together with all other ranks.

        Raises:
            RoundAbortedError: this view has ended, too; the next one goes on from here.
        """
        while self.lost_groups:
            key, group, members = self.lost_groups[0]
            number = self.process.new_group(list(members), f"{key} of a view before", self.process.timeout_s)
            group._become(Group(number, members))
            self.add_group(key, number, group)
            self.lost_groups.pop(0)
        if not self.goes_on:
            return
        ranks = {number: group.ranks for number, group in self.groups.items()}
        mine = failover.report(self.numbering, ranks, self.next_rounds(), self.interrupted)
        plan = failover.plan([failover.Report.decode(data) for data in failover.exchange(self.process, mine.encode())])
        self.numbering.first = plan.first
        while self.interrupted:
            self._continue(self.interrupted[0], plan)
            self.interrupted.pop(0)

    def _continue(self, each: failover.Interrupted, plan: failover.Plan) -> None:
        key, name = each.name
        number = self.numbering.number_of(key)
        if (each.name, each.round) in plan.again and (number, name) not in self.tensors:
            old = each.operation.tensor
            self.declare([(number, name, old.dtype, old.elements, old.shape, old.compression)])
        repeat = failover.resume(self.process, plan, each, number, self.tensors.get((number, name)))
        if repeat is not None:
            self.repeats.append(repeat)

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
        settings: values that override the environment, named without `BPS_` and in lower case, for example
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
        _tell_on_signal()
    finally:
        _end_change(change)


def _tell_on_signal() -> None:
    """SIGUSR1 shows the stacks of all threads, and then, by the native module's handler, what this rank waits for."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # of Python; the native module looks at the system's
        faulthandler.register(signal.SIGUSR1, file=2, chain=True)
    stacks.show()


def shutdown(timeout: float | None = None) -> None:
    """Leaves the job once all workers do, or after a while. Without a job it has no effect.

    Args:
        timeout: seconds to wait for the other workers; 0: leave at once, which is the loss of this rank to those that
            still need it. Default: BPS_SHUTDOWN_TIMEOUT.

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
            job.process.shutdown(job.config.seconds("BPS_SHUTDOWN_TIMEOUT") if timeout is None else timeout)
        finally:
            job.close()
            stacks.hide()
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
        ended = before = _ended
        if ended is None or before is None:
            raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
        try:
            while True:
                job = _next_view(before, change)
                try:
                    job.go_on()
                    break
                except RoundAbortedError:  # another member was lost meanwhile
                    before = job
                except BaseException:  # nobody can use it, and what it has begun must not write any more
                    with contextlib.suppress(BpsError):
                        job.process.shutdown(0.0)
                    raise
            _job = job
            return job
        finally:
            if _ended is ended:  # until here other threads wait for this one
                _ended = None
    finally:
        _end_change(change)


def _next_view(before: Job, change: _Change) -> Job:
    """The job in the view that follows one that has ended; go_on() must follow."""
    kept = {kind: before._parts.pop(kind) for kind in list(before._parts) if getattr(kind, "outlives_view", False)}
    goes_on = False
    try:
        process = _core.Process.renew(before.process, change.stop)
        interrupted = before.take_interrupted()
        # Other views may have begun and ended meanwhile, of which this process has noticed nothing here.
        old_ranks = {identity: rank for rank, identity in enumerate(before.identities)}
        ranks = {old_ranks[identity]: new for new, identity in enumerate(process.identities) if identity in old_ranks}
        has_same_workers = process.workers == len(ranks) == before.world.size
        goes_on = has_same_workers and process.survives_servers
        if goes_on:
            kept.update(before._parts)
            before._parts = {}
    finally:
        before.close()
        _core.release_orphans(all=before.process.is_down and not goes_on)
    job = Job(process, before.config, Group(0, tuple(range(process.workers))), follows=True)
    job._parts.update(kept)
    was_compressed = {before.numbering.name_of(one): one.compression for one in before.tensors.values()}
    job.compressed = before.compressed | {name: text for name, text in was_compressed.items() if text}
    for key, group, members in before.all_groups():
        job.lost_groups.append((key, group, tuple(ranks[rank] for rank in members if rank in ranks)))
    if goes_on:
        job.goes_on = True
        job.epoch, job.is_late = before.epoch, before.is_late
        job.interrupted = interrupted
        job.views = before.views | job.views
        job.numbering.next = before.next_rounds()
    else:
        for each in interrupted:
            each.operation.abort()
    return job


def resume() -> bool:
    """After the end of a view: goes into the next one, if what was under way can go on there. False: it cannot."""
    note_view_end()
    job = _job or _ended
    if job is None or not job.process.survives_servers:
        return False
    return current().goes_on


def rebound(process: _core.Process, tensor: _core.Tensor) -> tuple[_core.Process, _core.Tensor] | None:
    """What a prepared operation works on now that its view has ended; None: its job has ended, or other workers."""
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


def surviving(call: Callable[[], T]) -> T:
    """The result of a call that has no effect when it raises RoundAbortedError: repeated if only servers were lost."""
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
    wanted = _whole_numbers(ranks)
    return surviving(lambda: _make_group(wanted, name))


def _make_group(members: list[int], name: str) -> Group:
    job = current()
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
    if number not in job.groups:
        job.add_group(f"{job.process.epoch:08}.{number:08}", number, Group(number, tuple(members)))
    return job.groups[number]


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

    def wait() -> None:
        job = current()
        job.process.barrier(group_of(job, group).id, job.process.timeout_s if timeout is None else timeout)

    try:
        surviving(wait)
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

    def end_step() -> None:
        job = current()
        job.process.end_step(group_of(job, group).id, job.process.timeout_s if timeout is None else timeout)

    if current().may_lose_members:
        surviving(end_step)


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

    Data-plane and control-plane traffic, copies, stalls and rounds; csrc/core/metrics.h explains each one. "slot_bytes"
    and "open_rounds" are of this moment, and lack the loops that do not reply within two seconds ("silent_loops").
    """
    process = current().process
    return {"total": dict(process.metrics()), "transports": list(process.routes)}


def dump() -> dict[str, Any]:
    """What this process is doing, and what it waits for. `bps dump` collects this of all processes of a job.

    Returns:
        A dictionary. "operations" has an entry for each partition that is not finished on this rank: the "operation"
        with its name and round, "server", "waits_for" ("answer", or "credit" where it was not sent yet), "since_ms",
        and "left_ms" until its deadline. "rounds" has one for each round that a server of this process has open:
        "group", "tensor" (the id that operations have, too), "partition", "round", "waits_for", and "missing": the
        ranks that have not pushed. "calls" are those that wait for the scheduler, such as barriers. "loops" lists the
        loops; one that does not reply within half a second has "answered" false. Each lists 256 partitions and rounds
        at most. "recent" are the last operations, oldest first: "kind", "name", "bytes", "round", "state" ("open",
        "done" or "failed"), "age_ms" since it began, and "duration_us", which is -1 while it is open. "counters" are
        those of metrics(). Any thread may ask.
    """
    found: dict[str, Any] = json.loads(current().process.dump())
    return found


def get_pushpull_speed() -> tuple[int, float]:
    """(milliseconds since the epoch, MB/s of tensors finished since the last call or since init())."""
    job = current()
    now = time.monotonic()
    done = dict(job.process.metrics())["operation_bytes"]
    elapsed = max(now - job.window_start, 1e-9)
    speed = (done - job.window_bytes) / elapsed / 1e6
    job.window_start, job.window_bytes = now, done
    return int(time.time() * 1000), speed

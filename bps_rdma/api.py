"""The Python face: init, push_pull and its relatives, on numpy arrays, torch tensors and other CPU arrays.

All collective calls must be made by every rank of the group with the same name, dtype, size and options. Arrays are
used where they lie: nothing is copied on the way in or out.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bps_rdma import _core, arrays, startup
from bps_rdma.errors import (
    InvalidArgumentError,
    InvalidTensorError,
    NotInitializedError,
    UnknownHandleError,
)

Handle = _core.Handle
Kind = _core.Kind
ReduceOp = _core.ReduceOp
_SUM, _AVERAGE, _PUSH_PULL = ReduceOp.sum, ReduceOp.average, Kind.push_pull  # looked up once: it costs


@dataclass(frozen=True)
class Group:
    """Worker ranks that synchronise among themselves.

    Attributes:
        id: the number under which all members know it; 0 is the world.
        ranks: worker ranks, ascending.
    """

    id: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class SettingValue:
    """One setting: see `bps config`."""

    name: str
    value: str
    source: str
    default: str
    aliases: tuple[str, ...]
    help: str


class _Job:
    """Everything that lives from init() to shutdown()."""

    def __init__(self, process: Any, config: Any, world: Group) -> None:
        self.process = process
        self.config = config
        self.world = world
        self.groups: dict[int, Group] = {0: world}
        self.tensors: dict[tuple[int, str], _core.Tensor] = {}
        self.window_start = time.monotonic()
        self.window_bytes = 0


_job: _Job | None = None
_lock = threading.Lock()


def _current() -> _Job:
    if _job is None:
        raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
    return _job


# ---- Life


def init(**settings: object) -> None:
    """Joins the job; starts whatever is not running yet. Calling it again while it runs does nothing.

    Args:
        settings: values that override the environment, named without BPS_ and in lower case, for example
            `init(transport="tcp", partition_bytes=1 << 20)`. `config()` lists them.

    Raises:
        InvalidArgumentError: a setting or launcher variable cannot be used.
        UnreachableError, AuthenticationError, VersionError, PortTakenError: the scheduler or a server cannot be
            joined.
        DeadlineError: not all members came within BPS_JOIN_TIMEOUT seconds.
    """
    global _job
    with _lock:
        if _job is not None:
            return
        config = _config_with(settings)
        who = startup.from_config(config)
        process = _core.Process.start(config, who)
        _job = _Job(process, config, Group(0, tuple(range(process.workers))))
        atexit.register(shutdown)


def shutdown() -> None:
    """Leaves the job; waits, up to BPS_SHUTDOWN_TIMEOUT seconds, until all workers do. Without init() does nothing."""
    global _job
    with _lock:
        if _job is None:
            return
        job, _job = _job, None
        atexit.unregister(shutdown)
        job.process.shutdown(job.config.seconds("BPS_SHUTDOWN_TIMEOUT"))
        _core.release_orphans(all=True)  # nothing can be written into them any more


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _job is not None


def rank() -> int:
    """Rank of this worker, from 0."""
    return _current().process.rank  # type: ignore[no-any-return]


def size() -> int:
    """Number of workers."""
    return _current().world.size


def local_rank() -> int:
    """Rank of this worker on its host, as the launcher said; 0 without one."""
    return int(_current().config.text("BPS_LOCAL_RANK") or 0)


def local_size() -> int:
    """Workers on this host, as the launcher said; 1 without one."""
    return int(_current().config.text("BPS_LOCAL_SIZE") or 1)


def _config_with(settings: Mapping[str, object]) -> Any:
    config = _core.Config()
    for name, value in settings.items():
        text = ("1" if value else "0") if isinstance(value, bool) else str(value)
        config.set(f"BPS_{name.upper()}", text, "argument")
    return config


def config() -> list[SettingValue]:
    """Every setting with its value and where that came from. Works before init() too."""
    values = _job.config if _job is not None else _core.Config()
    return [
        SettingValue(name, values.text(name), values.source(name), default, tuple(aliases.split()), text)
        for name, aliases, default, text in _core.Config.table()
    ]


# ---- Groups and barriers


def new_group(ranks: Iterable[int], name: str = "") -> Group:
    """Makes (or finds) the group of some worker ranks. Every rank of the group calls it, others need not.

    Args:
        ranks: worker ranks, in any order.
        name: tells groups of the same ranks apart.

    Raises:
        InvalidArgumentError: a rank twice or out of range, or this rank not among them.
        DeadlineError, PeerLostError: a member did not call it in time, or is gone.
    """
    job = _current()
    members = sorted(ranks)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= job.world.size:
        raise InvalidArgumentError(
            f"{members} are not ranks of a world of {job.world.size}", "name each rank once, from 0"
        )
    if job.process.rank not in members:
        raise InvalidArgumentError(
            f"rank {job.process.rank} is not in the group {members}", "call new_group() on its members only"
        )
    number = job.process.new_group(members, name, job.process.timeout_s)
    group = Group(number, tuple(members))
    job.groups[number] = group
    return group


def barrier(group: Group | None = None, timeout: float | None = None) -> None:
    """Waits until every rank of the group has called it.

    Raises:
        DeadlineError: after `timeout` seconds (default: BPS_TIMEOUT); names the missing ranks.
        PeerLostError: a rank of the group is gone.
    """
    job = _current()
    job.process.barrier(_group(job, group).id, job.process.timeout_s if timeout is None else timeout)


def _group(job: _Job, group: Group | None) -> Group:
    if group is None:
        return job.world
    if job.groups.get(group.id) != group:
        raise InvalidArgumentError(f"{group} is not a group of this job", "make it with new_group() after init()")
    return group


# ---- Memory


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """A zeroed numpy array that the other processes of this host can map: synchronising it copies nothing.

    Args:
        shape: as for numpy.empty.
        dtype: as for numpy.empty; any that push_pull takes.

    Raises:
        TransportError: memory is short.
    """
    wanted = np.dtype(dtype)
    extent = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(extent)
    shared = _core.SharedMemory(max(count * wanted.itemsize, 1))
    view = memoryview(shared)
    array: np.ndarray[Any, Any] = np.frombuffer(view, dtype=wanted, count=count)
    return array.reshape(extent)


def _forget(identity: int) -> None:
    job = _job
    if job is not None:
        job.process.forget_memory(identity)


_core.when_block_gone(_forget)


# ---- Declaring


def declare(name: str, like: Any = None, *, shape: Any = None, dtype: Any = None, group: Group | None = None) -> None:
    """Makes a name known before its first use; see declare_many()."""
    declare_many({name: like if like is not None else (shape, dtype)}, group=group)


def declare_many(tensors: Mapping[str, Any], group: Group | None = None) -> None:
    """Makes any number of names known in one round trip. Optional: the first use of a name declares it, too.

    Args:
        tensors: name -> an array like the one to come, or (shape, dtype).

    Raises:
        MismatchError: a name is declared with another dtype or size here or on another rank; names both.
    """
    job = _current()
    members = _group(job, group)
    specs: list[tuple[int, str, Any, int, str]] = []
    for name, like in tensors.items():
        if isinstance(like, tuple) and len(like) == 2 and not hasattr(like, "dtype"):
            shape, dtype = like
            if shape is None or dtype is None:
                raise InvalidArgumentError(f"declare({name!r}) needs an array, or shape and dtype", "pass one of them")
            extent = (shape,) if isinstance(shape, int) else tuple(shape)
            core_dtype = arrays.NUMPY_DTYPES.get(str(np.dtype(dtype)) if dtype != "bfloat16" else dtype)
            if core_dtype is None:
                raise InvalidTensorError(f"dtype {dtype} is not supported", f"use one of {list(arrays.NUMPY_DTYPES)}")
            specs.append((members.id, name, core_dtype, math.prod(extent), str(extent)))
        else:
            memory = arrays.describe(like, writable=False)
            specs.append((members.id, name, memory.dtype, memory.elements, str(memory.shape)))
    for spec, tensor in zip(specs, job.process.declare(specs), strict=True):
        job.tensors[(members.id, spec[1])] = tensor


def _declared(job: _Job, members: Group, name: str, memory: arrays.Memory, count: int) -> _core.Tensor:
    known = job.tensors.get((members.id, name))
    if known is not None and known.fits(memory, count):
        return known
    shape = str(memory.shape) if count == memory.elements else f"({count},)"
    tensor: _core.Tensor = job.process.declare([(members.id, name, memory.dtype, count, shape)])[0]
    job.tensors[(members.id, name)] = tensor
    return tensor


# ---- push_pull


def push_pull(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
) -> Any:
    """Sum (or mean) over the group's ranks, as a new array; `array` stays as it is. See push_pull_inplace()."""
    return _reduce(array, arrays.empty_like(array), average, name, priority, group, awaited=True).wait()


def push_pull_inplace(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
) -> Any:
    """Replaces `array` by its sum (or mean) over the group's ranks, and returns it.

    Args:
        array: any shape; float32, float64, float16, bfloat16, int8, uint8, int32, int64, or bool (where the sum is
            "any" and there is no mean). Contiguous, writable, on the CPU.
        average: divide by the group's size, in the server's last pass. Integers are floor-divided. Half types are
            summed and divided in float32 and rounded once.
        name: what stands for this tensor on all ranks. None: calls are matched by their order per dtype and size.
        version: accepted for BytePS's sake; rounds are counted by the library.
        priority: higher goes first.
        group: default: all workers.

    Raises:
        InvalidTensorError, MismatchError, NotInitializedError: nothing has been sent.
        PeerLostError: a member is gone. DeadlineError: not complete within BPS_TIMEOUT; names the missing ranks.
    """
    return _reduce(array, array, average, name, priority, group, awaited=True).wait()


def push_pull_async(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
) -> Handle:
    """Starts push_pull(); the handle gives the new array. `array` must not change until then."""
    return _reduce(array, arrays.empty_like(array), average, name, priority, group)


def push_pull_async_inplace(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
) -> Handle:
    """Starts push_pull_inplace(); `array` must neither be read nor written until the handle is done."""
    return _reduce(array, array, average, name, priority, group)


def _reduce(
    array: Any,
    result: Any,
    average: bool,
    name: str | None,
    priority: int,
    group: Group | None,
    *,
    awaited: bool = False,
) -> Handle:
    target = arrays.describe(result, writable=True)
    source = target if result is array else arrays.describe(array, writable=False)
    op = _op(source, average)
    return _start(
        _PUSH_PULL, source, target, result, source.elements, name, group,
        op=op, priority=priority, awaited=awaited,
    )  # fmt: skip


def _op(memory: arrays.Memory, average: bool) -> Any:
    if average and memory.dtype == arrays.Dtype.bool:
        raise InvalidTensorError("bool has no mean", "pass average=False: the sum of bools is 'any'")
    return _AVERAGE if average else _SUM


def _start(
    kind: Any,
    source: arrays.Memory,
    target: arrays.Memory,
    result: Any,
    count: int,
    name: str | None,
    group: Group | None,
    *,
    op: Any = _SUM,
    pushes: bool = True,
    pulls: bool = True,
    root: int = 0,
    priority: int = 0,
    awaited: bool = True,
) -> Handle:
    job = _current()
    members = _group(job, group)
    if name is None:
        name = f"~{kind.name}.{source.dtype.name}.{count}"
    tensor = _declared(job, members, name, source, count)
    return job.process.start_operation(  # type: ignore[no-any-return]
        tensor, kind, op, source, target, result, pushes, pulls, root, priority, awaited
    )


# ---- Waiting


def poll(pending: Handle) -> bool:
    """Whether the operation is over, well or not.

    Raises:
        UnknownHandleError: not a handle, or its result has been taken.
    """
    return _checked(pending).done()


def synchronize(pending: Handle) -> Any:
    """Waits for the operation and returns its array; see Handle.wait()."""
    return _checked(pending).wait()


def wait(pending: Iterable[Handle]) -> list[Any]:
    """Waits for several operations and returns their arrays, in order. Raises the first error after all are over."""
    results: list[Any] = []
    error: Exception | None = None
    for one in pending:
        try:
            results.append(_checked(one).wait())
        except Exception as caught:
            error = error or caught
    if error is not None:
        raise error
    return results


def _checked(pending: object) -> Handle:
    if not isinstance(pending, Handle):
        raise UnknownHandleError(f"{pending!r} is not a handle", "pass what push_pull_async() returned")
    if pending.taken:
        raise UnknownHandleError("the result of this handle has been taken before", "wait for a handle once")
    return pending


# ---- Halves and relatives of push_pull


def push(array: Any, name: str, average: bool = True, priority: int = 0, group: Group | None = None) -> None:
    """Contributes `array` to the next round of `name`; `array` is free again on return. pull() gets the result."""
    memory = arrays.describe(array, writable=False)
    _start(
        Kind.split, memory, memory, None, memory.elements, name, group,
        op=_op(memory, average), pulls=False, priority=priority,
    ).wait()  # fmt: skip


def pull(array: Any, name: str, average: bool = True, priority: int = 0, group: Group | None = None) -> Any:
    """Fills `array` with the result of the next round of `name`, once all ranks have pushed to it; returns it.

    Rounds are pulled in the order in which they were pushed, each once. `average` must be what push() was given.
    """
    memory = arrays.describe(array, writable=True)
    return _start(
        Kind.split, memory, memory, array, memory.elements, name, group,
        op=_op(memory, average), pushes=False, priority=priority,
    ).wait()  # fmt: skip


def shard_bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Elements [begin, end) of part `index` when `count` elements are cut into `parts`, as torch.chunk cuts them."""
    step = -(-count // parts)
    return min(index * step, count), min((index + 1) * step, count)


def reduce_scatter(
    array: Any,
    average: bool = True,
    name: str | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
) -> Any:
    """Sums (or averages) `array` over the group and returns this rank's part: all is pushed, only the part is pulled.

    Args:
        array: n elements on every rank, any shape; taken as flat.
        out: where the part goes: its size must fit `shard_bounds(n, group size, place in the group)`. Default: a new
            flat array.
    """
    job = _current()
    members = _group(job, group)
    source = arrays.describe(array, writable=False)
    begin, end = shard_bounds(source.elements, members.size, members.ranks.index(job.process.rank))
    result = arrays.empty_flat(array, (end - begin,)) if out is None else out
    target = arrays.describe(result, writable=True)
    _check_size(target, source, end - begin, "out")
    return _start(
        Kind.reduce_scatter, source, target, result, source.elements, name, group,
        op=_op(source, average), priority=priority,
    ).wait()  # fmt: skip


def all_gather(
    array: Any, name: str | None = None, priority: int = 0, group: Group | None = None, out: Any = None
) -> Any:
    """Gathers one part of every rank into one array on all: only the own part is pushed.

    Args:
        array: this rank's part.
        out: n elements for the whole, of which this rank's part is `shard_bounds(n, group size, place)`. Default: a
            new array whose first dimension is the group's size times that of `array`; all parts are then equal.
    """
    job = _current()
    members = _group(job, group)
    part = arrays.describe(array, writable=False)
    if out is None:
        first, rest = (part.shape[0], part.shape[1:]) if part.shape else (1, ())
        out = arrays.empty_flat(array, (members.size * first, *rest))
    whole = arrays.describe(out, writable=True)
    begin, end = shard_bounds(whole.elements, members.size, members.ranks.index(job.process.rank))
    _check_size(part, whole, end - begin, "array")
    width = whole.nbytes // max(whole.elements, 1)
    own = whole.address + begin * width
    if part.address != own and part.nbytes > 0:
        _core.copy_bytes(own, part.address, part.nbytes)
    return _start(Kind.all_gather, part, whole, out, whole.elements, name, group, priority=priority).wait()


def _check_size(part: arrays.Memory, whole: arrays.Memory, count: int, what: str) -> None:
    if part.elements != count or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"`{what}` has {part.elements} elements of {part.dtype.name}, but this rank's part is {count} of "
            f"{whole.dtype.name}",
            "see shard_bounds()",
        )


def broadcast(array: Any, root: int = 0, name: str | None = None, priority: int = 0, group: Group | None = None) -> Any:
    """Replaces `array` on every rank by the one of worker rank `root`, and returns it."""
    job = _current()
    members = _group(job, group)
    if root not in members.ranks:
        raise InvalidArgumentError(
            f"root {root} is not in the group {members.ranks}", "name a worker rank of the group"
        )
    memory = arrays.describe(array, writable=True)
    return _start(
        Kind.broadcast, memory, memory, array, memory.elements, name, group,
        root=members.ranks.index(root), priority=priority,
    ).wait()  # fmt: skip


# ---- Seeing


def metrics() -> dict[str, Any]:
    """Counters of this process since init(): {"total": {name: count}, "transports": [route to each server]}.

    Data-plane and control-plane traffic, copies, stalls and rounds; what each one means is in docs/metrics.md.
    """
    process = _current().process
    return {"total": dict(process.metrics()), "transports": list(process.routes)}


def get_pushpull_speed() -> tuple[int, float]:
    """(milliseconds since the epoch, MB/s of tensors finished since the last call or since init())."""
    job = _current()
    now = time.monotonic()
    done = dict(job.process.metrics())["operation_bytes"]
    elapsed = max(now - job.window_start, 1e-9)
    speed = (done - job.window_bytes) / elapsed / 1e6
    job.window_start, job.window_bytes = now, done
    return int(time.time() * 1000), speed

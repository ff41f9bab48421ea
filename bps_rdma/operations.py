"""Operations on arrays: declare, push_pull and its relatives, and waiting for them.

Arrays are numpy arrays, CPU torch tensors and other CPU arrays; they are used where they lie: nothing is copied on the
way in or out. All collective calls must be made by every rank of the group with the same name, dtype, size and options.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bps_rdma import _core, arrays
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError, UnknownHandleError
from bps_rdma.job import Group, Job, current, group_of

Handle = _core.Handle
Kind = _core.Kind
ReduceOp = _core.ReduceOp
_SUM, _AVERAGE, _PUSH_PULL = ReduceOp.sum, ReduceOp.average, Kind.push_pull  # looked up once: it costs


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
    job = current()
    members = group_of(job, group)
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
            specs.append((members.id, name, memory.dtype, memory.elements, str(tuple(memory.shape))))
    for spec, tensor in zip(specs, job.process.declare(specs), strict=True):
        job.tensors[(members.id, spec[1])] = tensor


def _declared(job: Job, members: Group, name: str, memory: arrays.Memory, count: int) -> _core.Tensor:
    known = job.tensors.get((members.id, name))
    if known is not None and known.fits(memory, count):
        return known
    shape = str(tuple(memory.shape)) if count == memory.elements else f"({count},)"
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
    op: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Sum (or mean) over the group's ranks, as a new array; `array` stays as it is. See push_pull_inplace()."""
    result = arrays.empty_like(array)
    return _reduce(array, result, _op(average, op), name, priority, group, timeout, awaited=True).wait()


def push_pull_inplace(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
    op: str | None = None,
    timeout: float | None = None,
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
        op: "sum", "average", "min", "max" or "product", instead of what `average` says.
        timeout: seconds; default BPS_TIMEOUT.

    Raises:
        InvalidTensorError, MismatchError, NotInitializedError: nothing has been sent.
        PeerLostError: a member is gone. DeadlineError: not complete in time; names the missing ranks.
    """
    return _reduce(array, array, _op(average, op), name, priority, group, timeout, awaited=True).wait()


def push_pull_async(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
    op: str | None = None,
    timeout: float | None = None,
) -> Handle:
    """Starts push_pull(); the handle gives the new array. `array` must not change until then."""
    return _reduce(array, arrays.empty_like(array), _op(average, op), name, priority, group, timeout)


def push_pull_async_inplace(
    array: Any,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
    op: str | None = None,
    timeout: float | None = None,
) -> Handle:
    """Starts push_pull_inplace(); `array` must neither be read nor written until the handle is done."""
    return _reduce(array, array, _op(average, op), name, priority, group, timeout)


def _op(average: bool, op: str | None) -> Any:
    if op is None:
        return _AVERAGE if average else _SUM
    found = ReduceOp.__members__.get(op)
    if found is None:
        raise InvalidArgumentError(f"{op!r} is not an operation", f"use one of {', '.join(ReduceOp.__members__)}")
    return found


def _reduce(
    array: Any,
    result: Any,
    op: Any,
    name: str | None,
    priority: int,
    group: Group | None,
    timeout: float | None,
    *,
    awaited: bool = False,
) -> Handle:
    target = arrays.describe(result, writable=True)
    source = target if result is array else arrays.describe(array, writable=False)
    _check_op(source, op)
    return _start(
        _PUSH_PULL, source, target, result, source.elements, name, group,
        op=op, priority=priority, awaited=awaited, timeout=timeout,
    )  # fmt: skip


def _check_op(memory: arrays.Memory, op: Any) -> None:
    if op == _AVERAGE and memory.dtype == arrays.Dtype.bool:
        raise InvalidTensorError("bool has no mean", "pass average=False: the sum of bools is 'any'")


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
    awaited: bool = False,
    timeout: float | None = None,
) -> Handle:
    job = current()
    members = group_of(job, group)
    if name is None:
        name = f"~{kind.name}.{source.dtype.name}.{count}"
    tensor = _declared(job, members, name, source, count)
    return job.process.start_operation(  # type: ignore[no-any-return]
        tensor, kind, op, source, target, result, pushes, pulls, root, priority, awaited, timeout
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
    _split(array, name, _op(average, None), priority, group, pushes=True)


def pull(array: Any, name: str, average: bool = True, priority: int = 0, group: Group | None = None) -> Any:
    """Fills `array` with the result of the next round of `name`, once all ranks have pushed to it; returns it.

    Rounds are pulled in the order in which they were pushed, each once. `average` must be what push() was given.
    """
    return _split(array, name, _op(average, None), priority, group, pushes=False)


def _split(array: Any, name: str, op: Any, priority: int, group: Group | None, *, pushes: bool) -> Any:
    memory = arrays.describe(array, writable=not pushes)
    _check_op(memory, op)
    return _start(
        Kind.split, memory, memory, array, memory.elements, name, group,
        op=op, pushes=pushes, pulls=not pushes, priority=priority, awaited=True,
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
    op: str | None = None,
    timeout: float | None = None,
) -> Any:
    """Sums (or averages) `array` over the group and returns this rank's part: all is pushed, only the part is pulled.

    Args:
        array: n elements on every rank, any shape; taken as flat.
        out: where the part goes: its size must fit `shard_bounds(n, group size, place in the group)`. Default: a new
            flat array.
    """
    return _reduce_scatter(array, _op(average, op), name, priority, group, out, timeout, awaited=True).wait()


def reduce_scatter_async(
    array: Any,
    average: bool = True,
    name: str | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    op: str | None = None,
    timeout: float | None = None,
) -> Handle:
    """Starts reduce_scatter(); the handle gives the part. Neither array may be touched until then."""
    return _reduce_scatter(array, _op(average, op), name, priority, group, out, timeout)


def _reduce_scatter(
    array: Any,
    op: Any,
    name: str | None,
    priority: int,
    group: Group | None,
    out: Any,
    timeout: float | None,
    *,
    awaited: bool = False,
) -> Handle:
    job = current()
    members = group_of(job, group)
    source = arrays.describe(array, writable=False)
    _check_op(source, op)
    begin, end = shard_bounds(source.elements, members.size, members.ranks.index(job.process.rank))
    result = arrays.empty_flat(array, (end - begin,)) if out is None else out
    target = arrays.describe(result, writable=True)
    _check_size(target, source, end - begin, "out")
    return _start(
        Kind.reduce_scatter, source, target, result, source.elements, name, group,
        op=op, priority=priority, awaited=awaited, timeout=timeout,
    )  # fmt: skip


def all_gather(
    array: Any,
    name: str | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> Any:
    """Gathers one part of every rank into one array on all: only the own part is pushed.

    Args:
        array: this rank's part.
        out: n elements for the whole, of which this rank's part is `shard_bounds(n, group size, place)`. Default: a
            new array whose first dimension is the group's size times that of `array`; all parts are then equal.
    """
    return _all_gather(array, name, priority, group, out, timeout, awaited=True).wait()


def all_gather_async(
    array: Any,
    name: str | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> Handle:
    """Starts all_gather(); the handle gives the whole. `array` is free again on return, unless it lies in `out`."""
    return _all_gather(array, name, priority, group, out, timeout)


def _all_gather(
    array: Any,
    name: str | None,
    priority: int,
    group: Group | None,
    out: Any,
    timeout: float | None,
    *,
    awaited: bool = False,
) -> Handle:
    job = current()
    members = group_of(job, group)
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
    return _start(
        Kind.all_gather, part, whole, out, whole.elements, name, group,
        priority=priority, awaited=awaited, timeout=timeout,
    )  # fmt: skip


def _check_size(part: arrays.Memory, whole: arrays.Memory, count: int, what: str) -> None:
    if part.elements != count or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"`{what}` has {part.elements} elements of {part.dtype.name}, but this rank's part is {count} of "
            f"{whole.dtype.name}",
            "see shard_bounds()",
        )


def broadcast(
    array: Any,
    root: int = 0,
    name: str | None = None,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> Any:
    """Replaces `array` on every rank by the one of worker rank `root`, and returns it."""
    return _broadcast(array, root, name, priority, group, timeout, awaited=True).wait()


def broadcast_async(
    array: Any,
    root: int = 0,
    name: str | None = None,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> Handle:
    """Starts broadcast(); `array` must neither be read nor written until the handle is done."""
    return _broadcast(array, root, name, priority, group, timeout)


def _broadcast(
    array: Any,
    root: int,
    name: str | None,
    priority: int,
    group: Group | None,
    timeout: float | None,
    *,
    awaited: bool = False,
) -> Handle:
    job = current()
    members = group_of(job, group)
    if root not in members.ranks:
        raise InvalidArgumentError(
            f"root {root} is not in the group {members.ranks}", "name a worker rank of the group"
        )
    memory = arrays.describe(array, writable=True)
    return _start(
        Kind.broadcast, memory, memory, array, memory.elements, name, group,
        root=members.ranks.index(root), priority=priority, awaited=awaited, timeout=timeout,
    )  # fmt: skip


def forget(array: Any) -> None:
    """Says that the memory of an array has been given back and got anew, perhaps at the same address.

    Needed only where that happens behind the array's back, as by torch's `storage.resize_()`: what the transports know
    of the old memory is dropped. Nothing may be on its way.
    """
    _, _, identity = arrays.describe(array, writable=False).block
    _core.renew_block(identity)

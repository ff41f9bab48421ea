# SPDX-License-Identifier: Apache-2.0
"""Starting one operation of the core on arrays in CPU memory. The public functions and the torch face call these."""

from __future__ import annotations

from typing import Any

from bps_rdma import _core, arrays
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.job import current, group_of
from bps_rdma.operations.declare import declared
from bps_rdma.operations.options import AVERAGE, Options

Handle = _core.Handle
Kind = _core.Kind
_PUSH_PULL, _BOOL = Kind.push_pull, arrays.Dtype.bool  # looked up once: an attribute of a pybind11 enum costs a call


def reduce(array: Any, result: Any, options: Options) -> Handle:
    """Starts the reduction of `array` over the group into `result`, which may be the same array."""
    target = arrays.describe(result, True)
    source = target if result is array else arrays.describe(array, False)
    if options.op is AVERAGE and source.dtype == _BOOL:
        raise _no_mean()
    return _start(_PUSH_PULL, source, target, result, source.elements, options)


def split(array: Any, options: Options, *, pushes: bool) -> Handle:
    """Starts one half of a push_pull: the push of `array`, or the pull of the result into it."""
    memory = arrays.describe(array, not pushes)
    if options.op is AVERAGE and memory.dtype == _BOOL:
        raise _no_mean()
    return _start(Kind.split, memory, memory, array, memory.elements, options, pushes, not pushes)


def reduce_scatter(array: Any, out: Any, options: Options) -> Handle:
    """Starts the reduction of `array`, of which this rank gets its part in `out`; None: in a new array."""
    source = arrays.describe(array, False)
    if options.op is AVERAGE and source.dtype == _BOOL:
        raise _no_mean()
    begin, end = _own_part(source.elements, options)
    result = arrays.empty_flat(array, (end - begin,)) if out is None else out
    target = arrays.describe(result, True)
    _check_size(target, source, end - begin, "out")
    return _start(Kind.reduce_scatter, source, target, result, source.elements, options)


def all_gather(array: Any, out: Any, options: Options) -> Handle:
    """Starts gathering every rank's `array` into `out`; None: into a new array."""
    part = arrays.describe(array, False)
    if out is None:
        first, rest = (part.shape[0], part.shape[1:]) if part.shape else (1, ())
        out = arrays.empty_flat(array, (group_of(current(), options.group).size * first, *rest))
    whole = arrays.describe(out, True)
    begin, end = _own_part(whole.elements, options)
    _check_size(part, whole, end - begin, "array")
    own = whole.address + begin * (whole.nbytes // max(whole.elements, 1))
    if part.address != own and part.nbytes > 0:
        _core.copy_bytes(own, part.address, part.nbytes)
    return _start(Kind.all_gather, part, whole, out, whole.elements, options)


def broadcast(array: Any, root: int, options: Options) -> Handle:
    """Starts replacing `array` by that of worker rank `root`."""
    ranks = group_of(current(), options.group).ranks
    if root not in ranks:
        raise InvalidArgumentError(f"root {root} is not in the group {ranks}", "name a worker rank of the group")
    memory = arrays.describe(array, True)
    return _start(Kind.broadcast, memory, memory, array, memory.elements, options, root=ranks.index(root))


def _start(
    kind: Kind,
    source: arrays.Memory,
    target: arrays.Memory,
    result: Any,
    count: int,
    options: Options,
    pushes: bool = True,
    pulls: bool = True,
    root: int = 0,
) -> Handle:
    op, name, priority, group, timeout, awaited = options
    job = current()
    members = job.world if group is None else group_of(job, group)
    if name is None:
        name = f"~{kind.name}.{source.dtype.name}.{count}"
    tensor = declared(job, members, name, source, count)
    return job.process.start_operation(
        tensor, kind, op, source, target, result, pushes, pulls, root, priority, awaited, timeout
    )


def shard_bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Elements [begin, end) of part `index` when `count` elements are cut into `parts`, as torch.chunk cuts them."""
    step = -(-count // parts)
    return min(index * step, count), min((index + 1) * step, count)


def _own_part(count: int, options: Options) -> tuple[int, int]:
    job = current()
    members = group_of(job, options.group)
    return shard_bounds(count, members.size, members.ranks.index(job.process.rank))


def _no_mean() -> InvalidTensorError:
    return InvalidTensorError("bool tensors have no mean", "pass average=False: the sum of bools is 'any'")


def _check_size(part: arrays.Memory, whole: arrays.Memory, count: int, what: str) -> None:
    if part.elements != count or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"`{what}` has {part.elements} elements of {part.dtype.name}, but this rank's part is {count} of "
            f"{whole.dtype.name}",
            "see shard_bounds()",
        )

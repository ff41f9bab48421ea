# SPDX-License-Identifier: Apache-2.0
"""Starting one operation of the core. The public functions and the torch face call these.

What each operation does with which memory is described first; prepare.py describes it once for many starts.
"""

from __future__ import annotations

from itertools import starmap
from typing import Any, NamedTuple

from bps_rdma import _core, argument_types, arrays, devices
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError, RoundAbortedError
from bps_rdma.job import current, resume
from bps_rdma.operations.begun import of_thread
from bps_rdma.operations.declare import REDUCTIONS, declared
from bps_rdma.operations.options import AVERAGE, SUM, OperationOptions
from bps_rdma.operations.unnamed import unnamed
from bps_rdma.running_job import Job

Handle = _core.Handle
Kind = _core.Kind
_NOBODY = (1 << 32) - 1  # the root that means: no rank
_MOVING = (Kind.all_gather, Kind.broadcast, Kind.store)
_PUSH_PULL, _BOOL = Kind.push_pull, arrays.Dtype.bool  # looked up once: an attribute of an enum costs a call


class Described(NamedTuple):
    """One operation of the core, and the memory that it reads and writes.

    Attributes:
        kind: of the operation.
        source: what is pushed.
        target: what the result is written to.
        result: what the caller gets: the array of `target`.
        elements: of the whole tensor.
        root: position in the group of the rank that is copied, for a broadcast; see accumulate() for that.
        copy_to: where in the target the source must be copied first, to be sent from there; 0: none.
        again: see accumulate().
        declared: like what the name stands for, where `source` is not: feedback is float32 of tensors of all types.
    """

    kind: Kind
    source: arrays.Memory
    target: arrays.Memory
    result: Any
    elements: int
    root: int = 0
    copy_to: int = 0
    again: bool = False
    declared: arrays.Memory | None = None


def describe(array: Any, writable: bool) -> arrays.Memory:
    """Describes the memory of an array as arrays.describe() does, or as devices.describe() if it is on a GPU."""
    memory = _core.describe_array(array, writable)  # numpy arrays need no more
    if memory is not None:
        return memory
    if devices.has(array):
        return devices.describe(array, writable)
    return arrays.describe(array, writable)


def reduce(array: Any, result: Any, options: OperationOptions) -> Handle[Any]:
    """Starts the reduction of `array` over the group into `result`, which may be the same array."""
    target = describe(result, True)
    source = target if result is array else describe(array, False)
    check_mean(source, options)
    return _start(_PUSH_PULL, source, target, result, source.elements, options)


def split(array: Any, options: OperationOptions, *, pushes: bool) -> Handle[Any]:
    """Starts one half of a push_pull: the push of `array`, or the pull of the result into it."""
    memory = describe(array, not pushes)
    check_mean(memory, options)
    return _start(Kind.split, memory, memory, array, memory.elements, options, pushes, not pushes)


def reduce_scatter(array: Any, out: Any, options: OperationOptions) -> Handle[Any]:
    """Starts the reduction of `array`; this rank gets its part of it in `out`. None: in a new array."""
    return run(scattering(array, out, options), options)


def all_gather(array: Any, out: Any, options: OperationOptions, result: Any = None) -> Handle[Any]:
    """Starts gathering every rank's `array` into `out`; None: into a new array. `result`: what the handle gives."""
    found = gathering(array, out, options)
    if result is not None:
        found = found._replace(result=result)
    if at := found.copy_to:  # and sent from there, so that the caller may change `array`
        part = found.source
        _core.copy_bytes(at, part.address, part.nbytes)
        found = found._replace(source=found.target.part(at, part.elements, part.nbytes))
    return run(found, options)


def broadcast(array: Any, root: int, options: OperationOptions, result: Any = None) -> Handle[Any]:
    """Starts replacing `array` by that of worker rank `root`. `result`: what the handle then gives; None: `array`."""
    found = broadcasting(array, root, options)
    return run(found if result is None else found._replace(result=result), options)


def store(array: Any, root: int, options: OperationOptions) -> Handle[Any]:
    """Starts replacing `array` by that of worker rank `root`, which the servers keep."""
    return run(broadcasting(array, root, options)._replace(kind=Kind.store), options)


def unstore(array: Any, options: OperationOptions) -> Handle[Any]:
    """Starts replacing `array` by what the servers keep, on every rank; they forget it."""
    memory = describe(array, True)
    return run(Described(Kind.store, memory, memory, array, memory.elements, _NOBODY), options)


def accumulate(delta: Any, out: Any, most_ahead: int, again: bool, options: OperationOptions) -> Handle[Any]:
    """Starts adding `delta` to what the servers keep, which goes into `out`; None: into a new array.

    `most_ahead`: by how many of them this rank may be ahead of the slowest one, plus one; 0: by any number.
    `again`: it is the latest one, which has failed, and is added where it was not.
    """
    source = describe(delta, False)
    result = arrays.empty_like(delta) if out is None else out
    target = describe(result, True)
    _check_alike(target, source)
    check_apart(target, source, source.address)
    described = Described(Kind.accumulate, source, target, result, source.elements, most_ahead, again=again)
    return run(described, options)


def reducing(array: Any, out: Any, options: OperationOptions) -> Described:
    """Describes the reduction of `array` into `out`; None: in place."""
    result = array if out is None else out
    target = describe(result, True)
    source = target if result is array else describe(array, False)
    check_mean(source, options)
    _check_alike(target, source)
    check_apart(target, source, source.address)
    return Described(_PUSH_PULL, source, target, result, source.elements)


def scattering(array: Any, out: Any, options: OperationOptions) -> Described:
    """Describes a reduce_scatter; see reduce_scatter()."""
    source = describe(array, False)
    check_mean(source, options)
    begin, end = _own_part(source.elements, options)
    result = arrays.empty_flat(array, (end - begin,)) if out is None else out
    target = describe(result, True)
    _check_size(target, source, end - begin, "out")
    check_apart(target, source, source.address + begin * (source.nbytes // max(source.elements, 1)))
    return Described(Kind.reduce_scatter, source, target, result, source.elements)


def gathering(array: Any, out: Any, options: OperationOptions) -> Described:
    """Describes an all_gather; see all_gather()."""
    part = describe(array, False)
    if out is None:
        first, rest = (part.shape[0], part.shape[1:]) if part.shape else (1, ())
        out = arrays.empty_flat(array, (group_of(current(), options.group).size * first, *rest))
    whole = describe(out, True)
    begin, end = _own_part(whole.elements, options)
    _check_size(part, whole, end - begin, "array")
    if part.device != whole.device and part.nbytes > 0:
        raise InvalidTensorError(
            "the array and `out` are not in the memory of the same device",
            "pass arrays of one GPU, or both in CPU memory",
        )
    own = whole.address + begin * (whole.nbytes // max(whole.elements, 1))
    is_beside = part.address != own and part.nbytes > 0
    copies = is_beside and part.device < 0
    # From GPUs the core copies later, when answers may have come.
    if is_beside and overlaps(part, whole) and not copies:
        raise InvalidTensorError(
            f"the array of a GPU overlaps `out`, and is not its own part of it: elements {begin} to {end}",
            "pass that part of `out`, or an array of its own",
        )
    return Described(Kind.all_gather, part, whole, out, whole.elements, copy_to=own if copies else 0)


def broadcasting(array: Any, root: int, options: OperationOptions) -> Described:
    """Describes a broadcast; see broadcast()."""
    ranks = group_of(current(), options.group).ranks
    place = ranks.index(argument_types.check_root(root, ranks))
    memory = describe(array, True)
    return Described(Kind.broadcast, memory, memory, array, memory.elements, place)


def tensor_of(job: Job, kind: Kind, source: arrays.Memory, count: int, options: OperationOptions) -> _core.Tensor:
    """The declared tensor that an operation with these options works on."""
    members = job.world if options.group is None else group_of(job, options.group)
    name = options.name
    if name is None:
        if kind in REDUCTIONS:
            options = unnamed(options)
        name = f"~{kind.name}.{source.dtype.name}.{count}"
        if options.compression is not None:  # calls that travel in different ways do not meet
            name += f".{options.compression}"
    return declared(job, kind, members, name, source, count, options)


def run(described: Described, options: OperationOptions) -> Handle[Any]:
    """Starts an operation that has been described."""
    kind, source, target, result, count, root, _, again, like = described
    if options.op is not SUM and kind in _MOVING:  # servers would divide what is only moved
        options = options._replace(op=SUM)
    return _start(kind, source, target, result, count, options, root=root, again=again, like=like)


def _start(
    kind: Kind,
    source: arrays.Memory,
    target: arrays.Memory,
    result: Any,
    count: int,
    options: OperationOptions,
    pushes: bool = True,
    pulls: bool = True,
    root: int = 0,
    again: bool = False,
    like: arrays.Memory | None = None,
) -> Handle[Any]:
    op, name, priority, _, timeout, awaited, _ = options
    try:
        job = current()
        tensor = tensor_of(job, kind, like or source, count, options)
        what = job.process, tensor, kind, op, source, target, result
        begun = of_thread.begun
        if begun is None:
            return _core.start_operation(*what, pushes, pulls, root, priority, awaited, timeout, True, again)
        how = pushes, pulls, root, priority, awaited, timeout, True, again
        begun.extend(starmap(_core.start_operation, ((*what, *how),)))  # one step: see Lane.start()
        found: Handle[Any] = begun[-1]
        return found
    except RoundAbortedError:  # nothing has been started
        if not resume():
            raise
        return _start(kind, source, target, result, count, options, pushes, pulls, root, again, like)
    except TypeError:
        argument_types.explain(name=name, priority=priority, timeout=timeout)
        raise


def shard_bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Elements [begin, end) of part `index` when `count` elements are cut into `parts`, as torch.chunk cuts them.

    Raises:
        InvalidArgumentError: there is no such part.
    """
    if not 0 <= index < parts or count < 0:
        raise InvalidArgumentError(
            f"{count} elements in {parts} parts have no part {index}",
            "parts are counted from 0; pass 0 elements or more",
        )
    step = -(-count // parts)
    return min(index * step, count), min((index + 1) * step, count)


def _own_part(count: int, options: OperationOptions) -> tuple[int, int]:
    job = current()
    members = group_of(job, options.group)
    return shard_bounds(count, members.size, members.ranks.index(job.process.rank))


def check_mean(source: arrays.Memory, options: OperationOptions) -> None:
    """Raises InvalidTensorError for the mean of a tensor that has none."""
    if options.op is AVERAGE and source.dtype == _BOOL:
        raise InvalidTensorError("bool tensors have no mean", "pass average=False: the sum of bools is 'any'")


def _check_alike(target: arrays.Memory, source: arrays.Memory) -> None:
    if target.elements != source.elements or target.dtype != source.dtype:
        raise InvalidTensorError(
            f"`out` has {target.elements} elements of {target.dtype.name}, and the array {source.elements} of "
            f"{source.dtype.name}",
            "pass an array of the same size and dtype",
        )


def overlaps(one: arrays.Memory, other: arrays.Memory) -> bool:
    """Whether some bytes belong to both."""
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def check_apart(target: arrays.Memory, source: arrays.Memory, own: int) -> None:
    """Raises InvalidTensorError if answers would overwrite what is still to be sent; those at `own` cannot."""
    if target.address != own and overlaps(target, source):
        raise InvalidTensorError(
            "`out` overlaps the array, and does not begin where its result belongs",
            "pass an array of its own, or the part of the array that is replaced",
        )


def _check_size(part: arrays.Memory, whole: arrays.Memory, count: int, what: str) -> None:
    if part.elements != count or part.dtype != whole.dtype:
        raise InvalidTensorError(
            f"`{what}` has {part.elements} elements of {part.dtype.name}, but this rank's part is {count} of "
            f"{whole.dtype.name}",
            "see shard_bounds()",
        )

# SPDX-License-Identifier: Apache-2.0
"""push_pull of many arrays with one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, overload

from bps_rdma import argument_types
from bps_rdma import arrays as memories
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.group import Group
from bps_rdma.handle import PythonHandle
from bps_rdma.job import current
from bps_rdma.operations import start
from bps_rdma.operations.begun import of_thread, start_all, whole
from bps_rdma.operations.declare import declare_with
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import (
    AnyCompression,
    OperationOptions,
    ReduceName,
    Reducing,
    reducing,
    reduction,
    text_of,
)
from bps_rdma.positions import Unpack, keywords_of

A = TypeVar("A")


@overload
def push_pull_many(
    arrays: Mapping[str, A], name: str | None = ..., *, inplace: bool = ..., **options: Unpack[Reducing]
) -> dict[str, A]: ...
@overload
def push_pull_many(
    arrays: Sequence[A], name: str | None = ..., *, inplace: bool = ..., **options: Unpack[Reducing]
) -> list[A]: ...
@whole
def push_pull_many(
    arrays: Any,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    inplace: bool = False,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> Any:
    """Sums (or averages) many arrays over the group, as so many calls of push_pull() at the same time.

    All arrays are looked at, and new names declared in one round trip, before anything is sent. The first one has the
    highest priority.

    Args:
        arrays: {name: array}, or a list.
        name: stands before the names, as in "name.key", or before the numbers of a list, as in "name.0". None: the
            names alone; arrays of a list are then matched by their order per dtype and size.
        inplace: the results replace the arrays, of which no two may share memory. Default: they are new arrays.
        average, op, group, timeout, compression, exact: as for push_pull_inplace(), of all of them.
        priority: of the last array; the one before has one more.

    Returns:
        The results, by the same names or in the same order.

    Raises:
        InvalidTensorError, MismatchError: as push_pull_inplace(), of the first array with a fault; or two arrays share
            memory, and `inplace` is True. Nothing was sent.
        Otherwise as push_pull_inplace(), once all of them are over.
    """
    how = text_of(compression, exact)
    options = OperationOptions(reduction(average, op), None, priority, group, timeout, False, how)
    found = _together(arrays, name, inplace, options).wait()
    if inplace:
        for _, array in named(arrays, name):
            memories.note_change(array)
    return found


@whole
@keywords_of(push_pull_many)
def push_pull_many_async(
    arrays: Any, name: str | None = None, *, inplace: bool = False, **options: Unpack[Reducing]
) -> PythonHandle[Any]:
    """Starts push_pull_many(); the handle gives the results. No array may be changed until then."""
    return _together(arrays, name, inplace, reducing(None, False, **options))


def _together(arrays: Any, name: str | None, inplace: bool, options: OperationOptions) -> Together:
    argument_types.explain(name=name, priority=options.priority)
    inplace = argument_types.truth("inplace", inplace)
    by_name = named(arrays, name)
    described = []
    for each, array in by_name:
        if inplace:
            memories.note_change(array)
        out = array if inplace else memories.empty_like(array)
        described.append((each, start.reducing(array, out, options)))
    if inplace:
        check_shared([(found.target.device, found.target.address, found.target.nbytes) for _, found in described])
    _declare_new([(each, array) for each, array in by_name if each is not None], options)
    last = len(described) - 1
    begun = of_thread.begun
    assert begun is not None  # both callers are whole()
    first = len(begun)
    how = [
        options._replace(name=each, priority=options.priority + last - place)
        for place, (each, _) in enumerate(described)
    ]
    start_all([partial(start.run, found, each) for (_, found), each in zip(described, how, strict=True)], begun)
    return Together(begun[first:], lambda: like(arrays, [found.result for _, found in described]))


def check_shared(blocks: Sequence[tuple[Any, int, int]]) -> None:
    """Raises InvalidTensorError where two arrays share memory: what one becomes would be summed for the other.

    Args:
        blocks: (device, address, bytes) of each.
    """
    places = sorted((*block, place) for place, block in enumerate(blocks) if block[2] > 0)
    for (device, address, nbytes, one), (next_device, next_address, _, other) in pairwise(places):
        if device == next_device and next_address < address + nbytes:
            first, second = sorted((one, other))
            raise InvalidTensorError(
                f"the arrays at places {first} and {second} overlap, which are to be replaced by sums at the same time",
                "pass what is in both once, or leave out inplace=True",
            )


def named(arrays: Any, name: str | None) -> list[tuple[str | None, Any]]:
    """(name, array) of each; a name is None where calls are matched by their order.

    Raises:
        InvalidArgumentError: it is neither a dict nor a list.
    """
    if isinstance(arrays, Mapping):
        return [(key if name is None else f"{name}.{key}", array) for key, array in arrays.items()]
    if isinstance(arrays, list | tuple):
        return [(None if name is None else f"{name}.{place}", array) for place, array in enumerate(arrays)]
    raise InvalidArgumentError(
        f"a {type(arrays).__name__} is no dict and no list of arrays", "pass {name: array}, or [array, ...]"
    )


def like(arrays: Any, results: list[Any]) -> Any:
    """The results as a dict where `arrays` is one, and otherwise as a list."""
    return dict(zip(arrays, results, strict=True)) if isinstance(arrays, Mapping) else results


def _declare_new(by_name: list[tuple[str, Any]], options: OperationOptions) -> None:
    job = current()
    members = group_of(job, options.group)
    for name, _ in by_name:
        argument_types.check_name(name)
    new = {name: array for name, array in by_name if (members.id, name) not in job.tensors}
    if new:
        declare_with(new, options.group, options.compression)

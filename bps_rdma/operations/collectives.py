# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter, all_gather and broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from bps_rdma import argument_types, arrays
from bps_rdma._core import Handle
from bps_rdma.group import Group
from bps_rdma.handle import PythonHandle
from bps_rdma.operations import start
from bps_rdma.operations.begun import whole
from bps_rdma.operations.options import (
    SUM,
    AnyCompression,
    Moving,
    OperationOptions,
    ReduceName,
    Reducing,
    moving,
    reducing,
    reduction,
    text_of,
)
from bps_rdma.operations.push_pull import Numpy
from bps_rdma.operations.uneven import UnevenGather
from bps_rdma.positions import Unpack, keywords_of, keywords_since

if TYPE_CHECKING:
    import torch

A = TypeVar("A")  # an array; one that is replaced in place keeps its type


@overload
def reduce_scatter(
    array: Numpy, name: str | None = ..., *, out: Numpy | None = ..., **options: Unpack[Reducing]
) -> Numpy: ...
@overload
def reduce_scatter(
    array: torch.Tensor, name: str | None = ..., *, out: torch.Tensor | None = ..., **options: Unpack[Reducing]
) -> torch.Tensor: ...
@overload
def reduce_scatter(array: Any, name: str | None = ..., *, out: Any = ..., **options: Unpack[Reducing]) -> Any: ...
@keywords_since("average", "name", "priority", "group", "out", "op", "timeout", "compression", "exact")
def reduce_scatter(
    array: Any,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> Any:
    """Sums (or averages) `array` over the group and returns this rank's part.

    The whole array is pushed; only the part is pulled.

    Args:
        array: n elements on every rank, any shape; taken as flat.
        out: receives the part: its size must fit `shard_bounds(n, group size, place in the group)`. It may be that
            part of `array`, and must not overlap it otherwise. Default: a new flat array.
        average, name, priority, group, op, timeout, compression, exact: as for push_pull_inplace().

    Raises:
        InvalidTensorError: `out` has another size or dtype. Otherwise as push_pull_inplace().
    """
    options = OperationOptions(
        reduction(average, op), name, priority, group, timeout, True, text_of(compression, exact)
    )
    return _started(start.reduce_scatter(array, out, options), out).wait()


@whole
@keywords_since("average", "name", "priority", "group", "out", "op", "timeout", "compression", "exact")
@keywords_of(reduce_scatter)
def reduce_scatter_async(
    array: Any, name: str | None = None, *, out: Any = None, **options: Unpack[Reducing]
) -> Handle[Any]:
    """Starts reduce_scatter(); the handle gives the part. Neither array may be used until then."""
    return _started(start.reduce_scatter(array, out, reducing(name, False, **options)), out)


@overload
def all_gather(
    array: Numpy, name: str | None = ..., *, uneven: bool = ..., out: Numpy | None = ..., **options: Unpack[Moving]
) -> Numpy: ...
@overload
def all_gather(
    array: torch.Tensor,
    name: str | None = ...,
    *,
    uneven: bool = ...,
    out: torch.Tensor | None = ...,
    **options: Unpack[Moving],
) -> torch.Tensor: ...
@overload
def all_gather(
    array: Any, name: str | None = ..., *, uneven: bool = ..., out: Any = ..., **options: Unpack[Moving]
) -> Any: ...
@keywords_since("name", "priority", "group", "out", "timeout")
def all_gather(
    array: Any,
    name: str | None = None,
    *,
    uneven: bool = False,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> Any:
    """Gathers one part of every rank into one array on all ranks. Each rank pushes only its own part.

    Args:
        array: this rank's part.
        uneven: the first dimensions of the parts differ; the ranks tell each other first. The same on all ranks.
        out: n elements for the whole; this rank's part is `shard_bounds(n, group size, place)`, unless `uneven`.
            Default: a new array whose first dimension is the sum of those of all parts; without `uneven` these are
            equal.
        name, priority, group, timeout: as for push_pull_inplace().

    Raises:
        InvalidTensorError: `array` has another size or dtype than this rank's part of `out`. MismatchError: with
            `uneven`, parts differ in more than their first dimension. Otherwise as push_pull_inplace().
    """
    options = OperationOptions(SUM, name, priority, group, timeout, True)
    if uneven is not False and argument_types.truth("uneven", uneven):
        return _gather_uneven(array, out, options)
    return _started(start.all_gather(array, out, options), out).wait()


@whole
@keywords_since("name", "priority", "group", "out", "timeout")
@keywords_of(all_gather)
def all_gather_async(
    array: Any, name: str | None = None, *, uneven: bool = False, out: Any = None, **options: Unpack[Moving]
) -> Handle[Any] | PythonHandle[Any]:
    """Starts all_gather(); the handle gives the whole. `array` may be changed on return, unless it is a part of `out`.

    With `uneven`, and on a GPU, it may not.
    """
    found = moving(name, False, **options)
    if uneven is not False and argument_types.truth("uneven", uneven):
        arrays.note_change(out)
        return UnevenGather(array, out, found)
    return _started(start.all_gather(array, out, found), out)


@whole
def _gather_uneven(array: Any, out: Any, options: OperationOptions) -> Any:
    arrays.note_change(out)
    return UnevenGather(array, out, options).wait()


@keywords_since("root", "name", "priority", "group", "timeout")
def broadcast(
    array: A,
    name: str | None = None,
    *,
    root: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> A:
    """Replaces `array` on every rank by the one of worker rank `root`, and returns it.

    Args:
        array: of the same size and dtype on all ranks; any shape and any dtype of push_pull_inplace().
        root: worker rank whose array is taken.
        name, priority, group, timeout: as for push_pull_inplace().

    Raises:
        InvalidArgumentError: `root` is not in the group. MismatchError: ranks named different roots. Otherwise as
            push_pull_inplace().
    """
    _started(start.broadcast(array, root, OperationOptions(SUM, name, priority, group, timeout, True)), array).wait()
    return array


@whole
@keywords_since("root", "name", "priority", "group", "timeout")
@keywords_of(broadcast)
def broadcast_async(array: A, name: str | None = None, *, root: int = 0, **options: Unpack[Moving]) -> Handle[A]:
    """Starts broadcast(); `array` must neither be read nor written until the handle is done."""
    return _started(start.broadcast(array, root, moving(name, False, **options)), array)


def _started(handle: Handle[Any], out: Any) -> Handle[Any]:
    arrays.note_change(out)
    return handle

# SPDX-License-Identifier: Apache-2.0
"""push_pull in its four forms, and its halves push and pull."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from bps_rdma import arrays
from bps_rdma._core import Handle
from bps_rdma.group import Group
from bps_rdma.operations import start
from bps_rdma.operations.begun import whole
from bps_rdma.operations.options import (
    AnyCompression,
    OperationOptions,
    PushPulling,
    ReduceName,
    Reducing,
    of_values,
    reducing,
    reduction,
    text_of,
)
from bps_rdma.positions import Unpack, keywords_of, keywords_since

if TYPE_CHECKING:
    import numpy as np
    import torch

A = TypeVar("A")  # an array; one that is replaced in place keeps its type
# A new array has the type of such an array; others, such as a bytearray, give one of numpy's.
Numpy = TypeVar("Numpy", bound="np.ndarray[Any, Any]")

_in_the_order_of_byteps = keywords_since(
    "average", "name", "version", "priority", "group", "op", "timeout", "compression", "exact"
)


@_in_the_order_of_byteps
def push_pull_inplace(
    array: A,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    version: int = 0,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> A:
    """Replaces `array` by its sum (or mean) over the group's ranks, and returns it.

    Args:
        array: any shape; float32, float64, float16, bfloat16, int8, uint8, int32, int64, or bool (where the sum is
            "any" and there is no mean). Contiguous, writable, on the CPU.
        average: divide by the group's size, in the server's last pass. The mean of integers is
            rounded down; sums of integers wrap around, as numpy's do. Half types are summed and divided in float32 and
            rounded once.
        name: identifies this tensor on all ranks. None: calls are matched by their order per dtype and size.
        version: accepted for compatibility with BytePS and ignored; the library counts rounds itself.
        priority: operations with a higher priority are sent first.
        group: default: all workers.
        op: "sum", "average", "min", "max" or "product"; overrides `average`.
        timeout: seconds; default BPS_TIMEOUT.
        compression: how the tensor travels between hosts, as in Int8(feedback=True); see declare_many(). The result is
            then what the code says of the sum, the same on all ranks. For sums or means of float32,
            float16 and bfloat16 only.
        exact: True: the sum (or mean) of floating point is exact, and rounded once, so that its bits do not depend on
            how many ranks there are, or on anything else but the numbers (see docs/exact.md). Default: as the name
            was declared, or BPS_EXACT says.

    Raises:
        InvalidTensorError, MismatchError, NotInitializedError: nothing has been sent.
        PeerLostError: a member is gone. DeadlineError: not complete in time; names the missing ranks.
    """
    how = text_of(compression, exact)
    options = of_values((reduction(average, op), name, priority, group, timeout, True, how))
    start.reduce(array, array, options).wait()
    arrays.note_change(array)
    return array


@overload
def push_pull(array: Numpy, name: str | None = ..., **options: Unpack[PushPulling]) -> Numpy: ...
@overload
def push_pull(array: torch.Tensor, name: str | None = ..., **options: Unpack[PushPulling]) -> torch.Tensor: ...
@overload
def push_pull(array: Any, name: str | None = ..., **options: Unpack[PushPulling]) -> Any: ...
@_in_the_order_of_byteps
@keywords_of(push_pull_inplace)
def push_pull(array: Any, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]) -> Any:
    """Sum (or mean) over the group's ranks, as a new array; `array` stays as it is. See push_pull_inplace()."""
    return start.reduce(array, arrays.empty_like(array), reducing(name, True, **options)).wait()


@overload
def push_pull_async(array: Numpy, name: str | None = ..., **options: Unpack[PushPulling]) -> Handle[Numpy]: ...
@overload
def push_pull_async(
    array: torch.Tensor, name: str | None = ..., **options: Unpack[PushPulling]
) -> Handle[torch.Tensor]: ...
@overload
def push_pull_async(array: Any, name: str | None = ..., **options: Unpack[PushPulling]) -> Handle[Any]: ...
@whole
@_in_the_order_of_byteps
@keywords_of(push_pull_inplace)
def push_pull_async(
    array: Any, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]
) -> Handle[Any]:
    """Starts push_pull(); the handle gives the new array. `array` must not change until then."""
    return start.reduce(array, arrays.empty_like(array), reducing(name, False, **options))


@whole
@_in_the_order_of_byteps
@keywords_of(push_pull_inplace)
def push_pull_async_inplace(
    array: A, name: str | None = None, *, version: int = 0, **options: Unpack[Reducing]
) -> Handle[A]:
    """Starts push_pull_inplace(); `array` must neither be read nor written until the handle is done."""
    handle = start.reduce(array, array, reducing(name, False, **options))
    arrays.note_change(array)
    return handle


@keywords_since("name", "average", "priority", "group")
def push(
    array: Any,
    name: str,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> None:
    """Contributes `array` to the next round of `name` and returns when `array` may be changed again.

    Every rank then fetches the result with pull().

    Args:
        array, average, op, priority, group, timeout: as for push_pull_inplace().
        name: of the tensor.

    Raises:
        As push_pull_inplace().
    """
    start.split(
        array, OperationOptions(reduction(average, op), name, priority, group, timeout, True), pushes=True
    ).wait()


@keywords_since("name", "average", "priority", "group")
def pull(
    array: A,
    name: str,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
) -> A:
    """Fills `array` with the result of the next round of `name`, once all ranks have pushed to it; returns it.

    Rounds are pulled in the order in which they were pushed, each once.

    Args:
        array: of the size and dtype that were pushed.
        name, average, op, priority, group: what push() was given.
        timeout: as for push_pull_inplace().

    Raises:
        As push_pull_inplace().
    """
    options = OperationOptions(reduction(average, op), name, priority, group, timeout, True)
    start.split(array, options, pushes=False).wait()
    arrays.note_change(array)
    return array

"""What the core can send: dense CPU tensors of its dtypes; and which of torch's reductions it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bps_rdma import arrays
from bps_rdma._core import ReduceOp
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError

Finish = Callable[[], None]  # what remains to be done when the data are here

DTYPES = frozenset(getattr(torch, name) for name in arrays.NUMPY_DTYPES)

_Kind: Any = dist.ReduceOp.RedOpType
_OPERATIONS = {
    _Kind.SUM.value: ReduceOp.sum,  # by number: comparing torch's own objects takes longer than all the rest here
    _Kind.AVG.value: ReduceOp.average,
    _Kind.MIN.value: ReduceOp.min,
    _Kind.MAX.value: ReduceOp.max,
    _Kind.PRODUCT.value: ReduceOp.product,
}
_BITWISE = frozenset({_Kind.BAND.value, _Kind.BOR.value, _Kind.BXOR.value})


def operation(op: Any) -> ReduceOp | None:
    """The core's reduction for one of torch's; None for bitwise ones, which only gloo has.

    Raises:
        InvalidArgumentError: neither has it.
    """
    kind = op if type(op) is _Kind else op.op  # or a ReduceOp, which has one
    found = _OPERATIONS.get(kind.value)
    if found is None and kind.value not in _BITWISE:
        raise InvalidArgumentError(
            f"{kind.name} is not an operation of the bps backend",
            f"use one of {', '.join(_Kind(value).name for value in [*_OPERATIONS, *_BITWISE])}",
        )
    return found


def reducible(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The tensor as numbers that the core can reduce: a complex one is pairs of real ones.

    Raises:
        InvalidTensorError: its dtype cannot be reduced in this way.
    """
    if tensor.dtype in DTYPES:
        return tensor
    if tensor.is_complex() and op in (ReduceOp.sum, ReduceOp.average):
        return torch.view_as_real(tensor)
    raise InvalidTensorError(
        f"the {op.name} of {str(tensor.dtype).removeprefix('torch.')} tensors is not supported",
        f"convert them to one of {', '.join(arrays.NUMPY_DTYPES)}",
    )


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor under a dtype that the core knows: where it is only moved, any can be taken as bytes."""
    return tensor if tensor.dtype in DTYPES else tensor.detach().reshape(-1).view(torch.uint8)


def written(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[Finish]]:
    """Contiguous memory with the tensor's values, and how to bring back what is written there, unless it is its own."""
    if tensor.is_contiguous():
        return tensor, ()
    dense = tensor.detach().contiguous()
    return dense, [lambda: copy(tensor, dense)]


def filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[Finish]]:
    """As written(), for a tensor of which only the result counts."""
    if tensor.is_contiguous():
        return tensor, ()
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    return fresh, [lambda: copy(tensor, fresh)]


def gathered(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[Finish]]:
    """One buffer that becomes all parts, which are equally large: their own memory where they are consecutive."""
    whole = consecutive(parts)
    if whole is not None:
        return whole, ()
    count = parts[0].numel()
    whole = torch.empty(count * len(parts), dtype=parts[0].dtype)

    def finish() -> None:
        for part, values in zip(parts, whole.view(len(parts), count), strict=True):
            copy(part, values)

    return whole, [finish]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One buffer with all parts, one after the other: their own memory where they are consecutive."""
    whole = consecutive(parts)
    return torch.cat([part.detach().reshape(-1) for part in parts]) if whole is None else whole


def consecutive(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parts as one flat tensor over their memory, if they lie there one after the other."""
    first = parts[0]
    storage, end, count = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.numel() * part.element_size()
        count += part.numel()
    return first.detach().as_strided((count,), (1,), first.storage_offset())


def copy(to: torch.Tensor, values: torch.Tensor) -> None:
    """Brings values into a tensor of the same size, unseen by autograd."""
    to.detach().copy_(values.reshape(to.shape))

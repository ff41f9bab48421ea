# SPDX-License-Identifier: Apache-2.0
"""Contiguous memory with a tensor's values: its own where that is possible, otherwise a copy on the same device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bps_rdma import arrays
from bps_rdma.errors import InvalidTensorError
from bps_rdma.torch.transfer.flat_bytes import flat_bytes

Finish = Callable[[], None]  # the work that remains when the data have arrived

DTYPES = frozenset(getattr(torch, name) for name in arrays.NUMPY_DTYPES)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor under a dtype of the core, for operations that only move it: any other is viewed as bytes."""
    if tensor.dtype in DTYPES:
        return tensor.detach()
    if tensor.is_conj():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is a view of conjugate values", "pass tensor.resolve_conj()"
        )
    return flat_bytes(tensor) if tensor.is_contiguous() else tensor.detach()


def written(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[Finish]]:
    """Contiguous memory with the tensor's values, and how a result written there is brought back into the tensor."""
    if tensor.is_contiguous():
        return tensor, ()
    check_target(tensor)
    dense = tensor.detach().contiguous()
    return dense, [lambda: copy(tensor, dense)]


def filled(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[Finish]]:
    """Does what written() does, for a tensor that is only overwritten."""
    if tensor.is_contiguous():
        return tensor, ()
    check_target(tensor)
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return fresh, [lambda: copy(tensor, fresh)]


def gathered(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[Finish]]:
    """One buffer for all parts, which are equally large: their own memory where they are consecutive."""
    whole = consecutive(parts)
    if whole is not None:
        return whole, ()
    for part in parts:
        check_target(part)
    count = parts[0].numel()
    whole = torch.empty(count * len(parts), dtype=parts[0].dtype, device=parts[0].device)

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


def check_target(tensor: torch.Tensor) -> None:
    """Raises InvalidTensorError for a tensor whose elements share memory, as those of expand() do."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise InvalidTensorError(
            f"elements of the tensor share memory: its shape is {tuple(tensor.shape)}, and its strides are "
            f"{tensor.stride()}",
            "pass a copy of it: tensor.clone(memory_format=torch.contiguous_format)",
        )


def copy(to: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a tensor of the same size, unseen by autograd."""
    to.detach().copy_(values.reshape(to.shape))

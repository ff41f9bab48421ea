# SPDX-License-Identifier: Apache-2.0
"""Whether anybody but its parameter holds a gradient: in a list, or in a buffer. The mean must get there."""

from __future__ import annotations

import sys

import torch
from torch.utils.weak import WeakIdKeyDictionary

_count = getattr(torch._C, "_storage_Use_Count", None)
_lent = WeakIdKeyDictionary()
CAN_TELL = _count is not None  # not with old versions of torch that were built without CUDA


def sharers_of(memory: torch.Tensor) -> int:
    """A number that grows with that of the tensors that share this memory."""
    assert _count is not None
    found: int = _count(memory.untyped_storage()._cdata)
    return found


def held_gradient(parameter: torch.Tensor, *, arrives: bool = False) -> torch.Tensor | None:
    """The gradient of a parameter, if somebody may hold it.

    Args:
        arrives: autograd has just given it, and may share its memory.
    """
    gradient = parameter.grad
    if gradient is None or (arrives and gradient._version == 0):  # the last one is new
        return None
    if not CAN_TELL or sys.getrefcount(gradient) > _ALONE:
        return gradient
    return gradient if gradient.layout is torch.strided and sharers_of(gradient) > _UNSHARED else None


def lent(place: torch.Tensor) -> torch.Tensor:
    """A part of a buffer that is to be a gradient. A view would refuse detach_(), as some scripts call it."""
    gradient = place.detach()  # shares its version with the buffer, as a view does
    _lent[gradient] = None
    return gradient


def is_part(gradient: torch.Tensor) -> bool:
    """Whether a dense gradient is a part of a larger buffer. Others may write to that, and change its version.

    A gradient whose memory was replaced (`.grad.data = ...`) still has the version of the buffer.
    """
    is_view = gradient._is_view() or gradient in _lent
    return is_view or gradient.untyped_storage().nbytes() > gradient.numel() * gradient.itemsize


def is_shared(parameter: torch.Tensor) -> bool:
    """Whether other tensors may share memory and version with a parameter."""
    return is_part(parameter) or not CAN_TELL or sharers_of(parameter) > _UNSHARED


def is_of_the_script(parameter: torch.Tensor) -> bool:
    """Whether a gradient, which autograd has not just given, is one that a script has made, or holds."""
    gradient = parameter.grad
    if gradient is None or sys.getrefcount(gradient) > _ALONE:
        return gradient is not None
    return gradient.layout is torch.strided and is_part(gradient)


def _references(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    return sys.getrefcount(gradient)


def _references_of_grad() -> int:
    one, parameter = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    before = sys.getrefcount(one)
    parameter.grad = one
    return sys.getrefcount(one) - before


def _alone() -> tuple[int, int]:
    parameter = torch.zeros(1, device="cpu")
    parameter.grad = torch.zeros(1, device="cpu")
    return _references(parameter), sharers_of(parameter.grad) if CAN_TELL else 0


BY_GRAD = _references_of_grad()  # references to the Python object that a tensor gets as a .grad
_ALONE, _UNSHARED = _alone()

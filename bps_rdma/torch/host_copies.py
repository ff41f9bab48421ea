# SPDX-License-Identifier: Apache-2.0
"""CPU memory for tensors of operations that have no route from a device: there and back by a copy of the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import check_out
from bps_rdma.torch.checks import check_tensor


def read(tensor: torch.Tensor, *, by_core: bool = False) -> torch.Tensor:
    """CPU memory with what the tensor holds: itself on the CPU, and otherwise a copy, for which this waits.

    Args:
        tensor: on any device.
        by_core: for an operation of the core; with BPS_DEVICE_ROUTE that takes CUDA tensors themselves.
    """
    check_tensor(tensor)
    return tensor if _is_used_itself(tensor, by_core) else tensor.detach().cpu()


def _is_used_itself(tensor: torch.Tensor, by_core: bool) -> bool:
    return (transfer.staged_from if by_core else transfer.device_of)(tensor) is None


def written(
    tensor: torch.Tensor, *, by_core: bool = False
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """CPU memory for what the tensor is to hold, and how it is brought there. `by_core`: as for read()."""
    check_tensor(tensor)
    if _is_used_itself(tensor, by_core):
        return tensor, lambda _: tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), lambda host: copied(tensor, host)


def target(
    out: torch.Tensor | None, like: torch.Tensor, *, by_core: bool = False
) -> tuple[torch.Tensor | None, Callable[[torch.Tensor], torch.Tensor]]:
    """The same for an `out` that may be missing: the result is then a new tensor where `like` is."""
    if out is not None:
        check_out(out, like)
        return written(out, by_core=by_core)
    check_tensor(like)
    if _is_used_itself(like, by_core):
        return None, lambda host: host
    return None, lambda host: host.to(like.device)


def copied(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """The tensor, with what `host` holds; nothing is copied where they are one."""
    if host is not tensor:
        with torch.no_grad():
            tensor.copy_(host)
    return tensor

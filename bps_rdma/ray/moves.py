# SPDX-License-Identifier: Apache-2.0
"""Operations of a collective group on numpy arrays, and on torch's tensors on the CPU or a GPU. All wait for the end.

What is only moved is moved as bytes, so a member may have an array where its peer has a tensor.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import InvalidTensorError
from bps_rdma.operations import Options, ReduceOp
from bps_rdma.operations.options import ReduceName


def rows(array: Any, count: int) -> Any:
    """New memory for `count` arrays like this one."""
    shape = (count, *array.shape)
    return array.new_empty(shape) if _is_tensor(array) else np.empty(shape, array.dtype)


def all_reduce(array: Any, out: Any, op: ReduceName, group: Group) -> None:
    """Write the reduction into `out`, which may be the array."""
    if _is_tensor(array):
        from bps_rdma.torch import transfer

        transfer.all_reduce(array.detach(), _options(group, op), None if out is array else out).wait()
    elif out is array:
        bps_rdma.push_pull_inplace(array, op=op, group=group)
    else:
        out[...] = bps_rdma.push_pull(array, op=op, group=group)


def reduce_scatter(part: Any, whole: Any, op: ReduceName, group: Group) -> None:
    """Reduce `whole`; this rank's row of it goes to `part`."""
    if _is_tensor(part):
        from bps_rdma.torch import transfer

        transfer.reduce_scatter(part, whole, _options(group, op)).wait()
    else:
        bps_rdma.reduce_scatter(whole, out=part, op=op, group=group)


def all_gather(whole: Any, part: Any, group: Group) -> None:
    """Fill the rows of `whole` with the parts of all members."""
    if _is_tensor(part):
        from bps_rdma.torch import transfer

        transfer.all_gather(whole, part.detach(), _options(group)).wait()
    else:
        bps_rdma.all_gather(_as_bytes(part), out=_as_bytes(whole), group=group)


def broadcast(array: Any, root: int, group: Group, name: str | None = None) -> None:
    """Replace the array by that of worker rank `root`."""
    if _is_tensor(array):
        from bps_rdma.torch import transfer

        transfer.broadcast(_as_bytes(array.detach()), root, _options(group, name=name)).wait()
    else:
        bps_rdma.broadcast(_as_bytes(array), root, name=name, group=group)


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _options(group: Group, op: str = "sum", name: str | None = None) -> Options:
    return Options(ReduceOp.__members__[op], name, group=group, awaited=True)


def _as_bytes(array: Any) -> Any:
    """The same memory: numpy's arrays and torch's tensors meet under one name."""
    is_tensor = _is_tensor(array)
    if not (array.is_contiguous() if is_tensor else array.flags.c_contiguous):
        raise InvalidTensorError(f"the array of shape {tuple(array.shape)} is not contiguous", "pass a contiguous one")
    return array.reshape(-1).view(sys.modules["torch"].uint8 if is_tensor else np.uint8)

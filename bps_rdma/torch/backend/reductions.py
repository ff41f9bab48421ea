# SPDX-License-Identifier: Apache-2.0
"""torch's reductions in terms of the core's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bps_rdma import arrays
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.operations import ReduceOp
from bps_rdma.torch.backend.folded import Fold
from bps_rdma.torch.transfer.dense import DTYPES

_Kind: Any = dist.ReduceOp.RedOpType
_OPERATIONS = {
    _Kind.SUM.value: ReduceOp.sum,  # by number: comparing torch's own objects takes longer than all the rest here
    _Kind.AVG.value: ReduceOp.average,
    _Kind.MIN.value: ReduceOp.min,
    _Kind.MAX.value: ReduceOp.max,
    _Kind.PRODUCT.value: ReduceOp.product,
}
_BITWISE = {
    _Kind.BAND.value: Fold("BAND", torch.bitwise_and),
    _Kind.BOR.value: Fold("BOR", torch.bitwise_or),
    _Kind.BXOR.value: Fold("BXOR", torch.bitwise_xor),
}


def operation(op: Any) -> ReduceOp | Fold:
    """The core's reduction for one of torch's, or that of all gathered tensors for a bitwise one.

    Raises:
        InvalidArgumentError: there is none.
    """
    kind = op if type(op) is _Kind else op.op  # or a ReduceOp, which has one
    found = _OPERATIONS.get(kind.value) or _BITWISE.get(kind.value)
    if found is None:
        raise InvalidArgumentError(
            f"{kind.name} is not an operation of the bps backend",
            f"use one of {', '.join(_Kind(value).name for value in [*_OPERATIONS, *_BITWISE])}",
        )
    return found


def reducible(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The tensor as numbers that the core can reduce: a complex one is viewed as pairs of real ones.

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

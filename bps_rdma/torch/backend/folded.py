# SPDX-License-Identifier: Apache-2.0
"""Reductions that servers do not have, bitwise ones and those of sparse tensors: every rank gathers, and reduces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from bps_rdma.errors import InvalidTensorError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.uneven import UnevenGather
from bps_rdma.torch.backend.messages import Messages
from bps_rdma.torch.backend.pending import NOTHING, Call, Pending
from bps_rdma.torch.transfer import dense


class Fold(NamedTuple):
    """A reduction of two tensors to one, and its name."""

    name: str
    of_two: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def of(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The reduction of all."""
        return functools.reduce(self.of_two, rows)


class _Gathers(Protocol):
    def all_gather(self, whole: torch.Tensor, tensor: torch.Tensor, call: Call) -> Pending: ...


def fold_all(collectives: _Gathers, tensor: torch.Tensor, fold: Fold, ranks: int, call: Call) -> Pending:
    """Replaces the tensor by the reduction over all ranks."""
    _check(tensor, fold)
    dense.check_target(tensor)
    if tensor.numel() == 0:
        return NOTHING
    whole = torch.empty((ranks, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
    handles, finishes, _ = collectives.all_gather(whole, tensor.detach().reshape(-1), call)
    return Pending(handles, [*finishes, lambda: dense.copy(tensor, fold.of(list(whole)))])


def fold_parts(
    messages: Messages, output: torch.Tensor, parts: Sequence[torch.Tensor], fold: Fold, call: Call
) -> Pending:
    """This rank's part of the reduction, from one tensor per rank."""
    _check(output, fold)
    rows = [torch.empty(output.numel(), dtype=output.dtype, device=output.device) for _ in parts]
    handles, finishes, _ = messages.all_to_all(rows, [part.reshape(-1) for part in parts], call)
    return Pending(handles, [*finishes, lambda: dense.copy(output, fold.of(rows))])


def _check(tensor: torch.Tensor, fold: Fold) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        raise InvalidTensorError(
            f"{fold.name} is not a reduction of {str(tensor.dtype).removeprefix('torch.')} tensors",
            "pass integers or bools",
        )


def sum_sparse(tensor: torch.Tensor, op: ReduceOp | Fold, ranks: int, options: OperationOptions) -> Pending:
    """Replaces a sparse tensor by the sum (or mean) over all ranks: they gather their rows, and add them."""
    if op not in (ReduceOp.sum, ReduceOp.average) or tensor.layout is not torch.sparse_coo:
        raise InvalidTensorError(
            f"the {op.name} of a tensor with the layout {tensor.layout} is not supported",
            "reduce sparse_coo tensors by SUM or AVG, or pass tensor.to_dense()",
        )
    own = tensor.detach().coalesce()
    name = f"{options.name}, {tuple(tensor.shape)}"
    rows = own.indices().t().contiguous().cpu()
    values = own.values().contiguous().cpu()
    gathered: list[Any] = [
        UnevenGather(rows, None, options._replace(op=ReduceOp.sum, name=f"{name}, indices")),
        UnevenGather(values, None, options._replace(op=ReduceOp.sum, name=f"{name}, values")),
    ]

    def finish() -> None:
        indices, added = (one.wait() for one in gathered)
        found = torch.sparse_coo_tensor(
            indices.t(), added, tensor.shape, device="cpu", check_invariants=True
        ).coalesce()
        if op is ReduceOp.average:
            found = found / ranks
        with torch.no_grad():
            tensor.copy_(found.to(tensor.device))

    return Pending(gathered, [finish])

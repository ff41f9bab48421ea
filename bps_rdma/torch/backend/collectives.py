# SPDX-License-Identifier: Apache-2.0
"""torch's collectives in terms of the core's operations: each starts some and returns what remains to be done after.

They take dense tensors of any strides. Contiguous ones are used in place, others through a copy. All ranks of a group
start them in one order, as torch demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bps_rdma import Group
from bps_rdma.errors import InvalidTensorError
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.operations.unnamed import unnamed
from bps_rdma.torch import transfer
from bps_rdma.torch.backend.counted import counted_groups
from bps_rdma.torch.backend.folded import Fold, fold_all, fold_parts
from bps_rdma.torch.backend.messages import Messages
from bps_rdma.torch.backend.pending import NOTHING, Call, Pending, together
from bps_rdma.torch.backend.reductions import reducible
from bps_rdma.torch.transfer import dense


class Collectives:
    """The collectives of one group.

    Args:
        rank: of this process in the group.
        ranks: worker ranks, in torch's order of the group.
        group: the core's group of the same ranks; None: all workers.
        prefix: of the names of this group's operations.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: Group | None, prefix: str) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._group = group
        self._in_order = list(ranks) == sorted(ranks)  # otherwise parts lie differently here and in the core
        self._prefix = prefix
        self._names: dict[tuple[str, torch.dtype, int], str] = {}
        self.messages = Messages(rank, ranks, group, prefix)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Worker ranks, in torch's order of the group."""
        return self._ranks

    def of_some(self, ranks: Sequence[int]) -> Collectives:
        """Those of some ranks of this group, which are given in their order."""
        chosen = [self._ranks[rank] for rank in ranks]
        return Collectives(ranks.index(self._rank), chosen, counted_groups().make(chosen), self._prefix)

    def reduce(self, tensor: torch.Tensor, op: ReduceOp | Fold, call: Call) -> Pending:
        """Replaces the tensor by the reduction over all ranks."""
        if isinstance(op, Fold):
            return fold_all(self, tensor, op, len(self._ranks), call)
        data, finish = dense.written(reducible(tensor, op))
        if data.numel() == 0:
            return NOTHING
        options = self.options("all_reduce", data, op, call)
        return Pending((transfer.all_reduce(data, options, in_order=True),), finish)

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, op: ReduceOp | Fold, call: Call) -> Pending:
        """This rank's part of the reduction; `output` may be that part of `whole`."""
        if whole.numel() != output.numel() * len(self._ranks) or whole.dtype != output.dtype:
            raise _not_a_multiple(whole, output, len(self._ranks))
        if not self._in_order:
            return self.reduce_scatter_parts(output, list(whole.reshape(len(self._ranks), -1)), op, call)
        if isinstance(op, Fold):
            return fold_parts(self.messages, output, list(whole.reshape(len(self._ranks), -1)), op, call)
        source = reducible(whole, op).contiguous()
        target, finish = dense.filled(reducible(output, op))
        if source.numel() == 0:
            return NOTHING
        options = self.options("reduce_scatter", source, op, call)
        return Pending((transfer.reduce_scatter(target, source, options, in_order=True),), finish)

    def reduce_scatter_parts(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp | Fold, call: Call
    ) -> Pending:
        """This rank's part of the reduction, from one tensor per rank."""
        self._check(parts, output, "output")
        dense.check_target(output)
        if isinstance(op, Fold):
            return fold_parts(self.messages, output, parts, op, call)
        if self._in_order and _equal(parts):
            return self.reduce_scatter(output, dense.joined(parts), op, call)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        begin = sum(part.numel() for part in parts[: self._rank])
        handles, finishes, _ = self.reduce(whole, op, call)
        return Pending(handles, [*finishes, lambda: dense.copy(output, whole[begin : begin + output.numel()])])

    def broadcast(self, tensor: torch.Tensor, root: int, call: Call) -> Pending:
        """Replaces the tensor by that of rank `root` of the group."""
        sends = root == self._rank
        data, finish = (tensor.detach().contiguous(), ()) if sends else dense.written(tensor)
        if data.numel() == 0:
            return NOTHING
        data = dense.as_bytes(data)
        options = self.options("broadcast", data, ReduceOp.sum, call)
        return Pending((transfer.broadcast(data, self._ranks[root], options, in_order=True),), finish)

    def all_gather(self, whole: torch.Tensor, tensor: torch.Tensor, call: Call) -> Pending:
        """Every rank's tensor, one after the other; `tensor` may be this rank's part of `whole`."""
        if whole.numel() != tensor.numel() * len(self._ranks) or whole.dtype != tensor.dtype:
            raise _not_a_multiple(whole, tensor, len(self._ranks))
        target, finish = dense.filled(whole)
        if not self._in_order:
            pending = self.all_gather_parts(list(target.view(len(self._ranks), -1)), tensor, call)
            return Pending(pending.handles, [*pending.finishes, *finish])
        if target.numel() == 0:
            return NOTHING
        data = dense.as_bytes(target)
        options = self.options("all_gather", data, ReduceOp.sum, call)
        part = dense.as_bytes(tensor.contiguous())
        return Pending((transfer.all_gather(data, part, options, in_order=True),), finish)

    def all_gather_parts(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, call: Call) -> Pending:
        """Every rank's tensor, each in one of its own; they may differ in size."""
        self._check(parts, tensor, "input")
        if self._in_order and _equal(parts):
            whole, finish = dense.gathered(parts)
            handles = self.all_gather(whole, tensor, call).handles
            return Pending(handles, finish, whole.view(len(parts), *parts[0].shape))
        for part in parts:
            dense.check_target(part)
        dense.copy(parts[self._rank], tensor)
        return together(self.broadcast(part, root, call) for root, part in enumerate(parts))

    def barrier(self, call: Call) -> Pending:
        """Complete once every rank has called it."""
        token = np.zeros(1, np.uint8)
        options = OperationOptions(ReduceOp.max, f"{self._prefix}.barrier", 0, self._group, call.seconds, call.awaited)
        return Pending((start.reduce(token, token, options),))

    def options(self, kind: str, data: torch.Tensor, op: ReduceOp, call: Call) -> OperationOptions:
        """The options of an operation. Names number the kinds, dtypes and sizes that this group has used.

        So ranks that call with different ones declare one name differently, which the core reports at once.
        """
        key = (kind, data.dtype, data.numel())
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{self._prefix}.{len(self._names)}"
        return unnamed(OperationOptions(op, name, 0, self._group, call.seconds, call.awaited))

    def _check(self, parts: Sequence[torch.Tensor], own: torch.Tensor, what: str) -> None:
        mine = parts[self._rank] if len(parts) == len(self._ranks) else None
        if mine is None or mine.numel() != own.numel() or any(part.dtype != own.dtype for part in parts):
            raise InvalidTensorError(
                f"the list {[(tuple(part.shape), part.dtype) for part in parts]} does not fit {len(self._ranks)} ranks "
                f"of which rank {self._rank}, this one, has the {what} {(tuple(own.shape), own.dtype)}",
                "pass one tensor per rank, of the dtype and size that the rank has",
            )


def _equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.numel() == parts[0].numel() for part in parts)


def _not_a_multiple(whole: torch.Tensor, part: Any, times: int) -> InvalidTensorError:
    return InvalidTensorError(
        f"{whole.numel()} elements of {whole.dtype} are not {times} times {part.numel()} of {part.dtype}",
        "the large tensor has as many times the elements of the small one as the group has ranks",
    )

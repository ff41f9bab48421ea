# SPDX-License-Identifier: Apache-2.0
"""The replacement of a bucket group's communication group: its collectives are push/pull operations of bps_rdma.

Megatron calls three of them, through torch's coalescing manager, and uses groups of its own for everything else
(broadcasts of parameters, norms, checkpoints). Gradients and parameters are used in place in Megatron's buffers, or
staged from there where those are on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bps_rdma import Group, job
from bps_rdma.errors import InvalidTensorError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch.backend.reductions import operation
from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.transfer import AnyHandle, all_gather, all_reduce, reduce_scatter

_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class _Counted:
    """The tensors that went through bps_rdma in one job, by kind of collective."""

    def __init__(self) -> None:
        self.tensors = dict.fromkeys(_KINDS, 0)


class _Counts(Mapping[str, int]):
    """Kind of collective -> tensors of this process that went through bps_rdma in the running job; 0 without a job."""

    def __getitem__(self, kind: str) -> int:
        return job.current().part(_Counted).tensors[kind] if job.is_initialized() else dict.fromkeys(_KINDS, 0)[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(_KINDS)

    def __len__(self) -> int:
        return len(_KINDS)


counts = _Counts()


class Communicator:
    """The collectives of one bucket group. As with NCCL, all ranks call them for their bucket groups in the same order.

    Args:
        stock: the group that Megatron would use; it has the ranks.
        group: ours of the same ranks; None: all workers.
        name: of this bucket group among all of this process; the same on all ranks of the group.
        priority: higher goes first.
    """

    def __init__(self, stock: Any, group: Group | None, name: str, priority: int) -> None:
        self.stock = stock
        self._group = group
        self._name = name
        self._priority = priority

    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.stock.rank()  # type: ignore[no-any-return]

    def size(self) -> int:
        """Ranks in the group."""
        return self.stock.size()  # type: ignore[no-any-return]

    def name(self) -> str:
        """The name of the group in messages."""
        return f"bps {self._name}"

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> BpsWork:
        """Every rank's tensors become the sums (or means) of all, in place."""
        op = _operation(opts)
        _count("all_reduce", tensors)
        return _work(
            [
                all_reduce(tensor, self._options("sum", place, op), in_order=True)
                for place, tensor in enumerate(tensors)
            ],
            tensors,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> BpsWork:
        """Pushes all and pulls only the own shard: `outputs` are this rank's shards, which may be views of `inputs`."""
        op = _operation(opts)
        _count("reduce_scatter", outputs)
        return _work(
            [
                reduce_scatter(part, whole, self._options("shard", place, op), in_order=True)
                for place, (part, whole) in enumerate(zip(outputs, inputs, strict=True))
            ],
            outputs,
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BpsWork:
        """Pushes only the own shard and pulls all."""
        _count("all_gather", outputs)
        return _work(
            [
                all_gather(whole, part, self._options("gather", place), in_order=True)
                for place, (whole, part) in enumerate(zip(outputs, inputs, strict=True))
            ],
            outputs,
        )

    # Names before torch 2.13
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _options(self, kind: str, place: int, op: ReduceOp = ReduceOp.sum) -> OperationOptions:
        return OperationOptions(op, f"{self._name} {kind} {place}", self._priority, self._group)


def _count(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    job.current().part(_Counted).tensors[kind] += len(tensors)


def _work(handles: Sequence[AnyHandle], tensors: list[torch.Tensor]) -> BpsWork:
    return BpsWork("push_pull", handles, (), tensors, tensors)


def _operation(opts: Any) -> ReduceOp:
    found = operation(opts.reduceOp)
    if not isinstance(found, ReduceOp):
        raise InvalidTensorError(f"servers cannot reduce by {opts.reduceOp}", "leave out --use-bps")
    return found

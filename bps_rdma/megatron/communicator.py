"""What stands in the place of a bucket group's communication group: its collectives are push/pull operations of ours.

Megatron calls three of them, through torch's coalescing manager, and keeps everything else (broadcasts of parameters,
norms, checkpoints) on groups of its own. Gradients and parameters are used where they lie in Megatron's buffers,
or staged from there where that is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bps_rdma import Group, Handle
from bps_rdma.errors import InvalidTensorError
from bps_rdma.torch.backend.dense import operation
from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.staging import StagedOperation, all_gather, all_reduce, reduce_scatter

counts = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}  # tensors of this process; for tests and the curious


class Communicator:
    """The collectives of one bucket group.

    Args:
        stock: the group that Megatron would use; who takes part is asked of it.
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
        """Of this process in the group."""
        return self.stock.rank()  # type: ignore[no-any-return]

    def size(self) -> int:
        """Ranks in the group."""
        return self.stock.size()  # type: ignore[no-any-return]

    def name(self) -> str:
        """For messages."""
        return f"bps {self._name}"

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> BpsWork:
        """Every rank's tensors become the sums (or means) of all, in place."""
        op = _operation(opts)
        counts["all_reduce"] += len(tensors)
        return _work(
            [
                all_reduce(tensor, self._key("sum", place), op, self._priority, self._group)
                for place, tensor in enumerate(tensors)
            ],
            tensors,
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> BpsWork:
        """All is pushed, only the own shard is pulled: `outputs` are this rank's shards, views of `inputs` or not."""
        op = _operation(opts)
        counts["reduce_scatter"] += len(outputs)
        return _work(
            [
                reduce_scatter(part, whole, self._key("shard", place), op, self._priority, self._group)
                for place, (part, whole) in enumerate(zip(outputs, inputs, strict=True))
            ],
            outputs,
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> BpsWork:
        """Only the own shard is pushed, all is pulled."""
        counts["all_gather"] += len(outputs)
        return _work(
            [
                all_gather(whole, part, self._key("gather", place), self._priority, self._group)
                for place, (whole, part) in enumerate(zip(outputs, inputs, strict=True))
            ],
            outputs,
        )

    # Names before torch 2.13
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _key(self, kind: str, place: int) -> str:
        return f"{self._name} {kind} {place}"


def _work(handles: Sequence[Handle | StagedOperation], tensors: list[torch.Tensor]) -> BpsWork:
    return BpsWork("push_pull", handles, (), tensors, tensors)


def _operation(opts: Any) -> str:
    found = operation(opts.reduceOp)
    if found is None:
        raise InvalidTensorError(f"servers cannot reduce by {opts.reduceOp}", "leave out --use-dpu-reduce")
    return str(found.name)

# SPDX-License-Identifier: Apache-2.0
"""The reductions of a process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from bps_rdma.operations import ReduceOp
from bps_rdma.operations.begun import whole
from bps_rdma.torch.backend.base_group import BaseGroup, Tensor, c10d, each, only, operation_of, options_of, rooted
from bps_rdma.torch.backend.folded import sum_sparse
from bps_rdma.torch.backend.pending import Call, Pending, together
from bps_rdma.torch.backend.recurring import may_recur
from bps_rdma.torch.backend.work import done


class Sums(BaseGroup):
    """A group's reductions. Those of tensors that come again are prepared."""

    @whole
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes the reduction of all; see docs/torch-backend.md for operations and dtypes."""
        tensor = only(tensors)
        op = operation_of(opts)
        if not self._is_at_home(tensor):
            return self._inner(tensor).allreduce([tensor], options_of(c10d.AllreduceOptions(), opts))
        call = self._call(opts, timeout)
        if call.awaited and isinstance(op, ReduceOp) and self._recurring.run(tensor, op, call.seconds):
            return done()
        if tensor.layout is not torch.strided:
            return self._sum_sparse(tensor, op, call)
        if not self._takes(tensor):
            return self._inner(tensor).allreduce([tensor], options_of(c10d.AllreduceOptions(), opts))
        work = self._work("all_reduce", self._collectives.reduce(tensor, op, call), [tensor], [tensor], call)
        if call.awaited and isinstance(op, ReduceOp) and may_recur(tensor):
            self._recurring.note(tensor, self._collectives.options("all_reduce", tensor, op, call))
        return work

    def _sum_sparse(self, tensor: Tensor, op: Any, call: Call) -> Any:
        like = torch.empty(0, dtype=tensor.dtype, device="cpu")
        options = self._collectives.options("all_reduce", like, ReduceOp.sum, call)
        return self._work("all_reduce", sum_sparse(tensor, op, self.size(), options), [tensor], [tensor], call)

    @whole
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """allreduce() of several tensors."""
        op = operation_of(opts)
        if not all(map(self._takes, tensors)):
            return self._inner(tensors[0]).allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())
        call = self._call(opts)
        pending = together(self._collectives.reduce(tensor, op, call) for tensor in tensors)
        return self._work("all_reduce", pending, tensors, tensors, call)

    @whole
    def reduce(self, tensors: Any, opts: Any, op: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduces for one rank; on the others the result goes into a scratch buffer, not into the tensor."""
        tensor = only(tensors)
        opts = rooted(c10d.ReduceOptions(), opts, op)
        found = operation_of(opts)
        if not self._takes(tensor):
            return self._inner(tensor).reduce([tensor], opts)
        here = opts.rootRank == self.rank()
        target = tensor if here else tensor.detach().clone(memory_format=torch.contiguous_format)
        call = self._call(opts, timeout)
        return self._work("reduce", self._collectives.reduce(target, found, call), [tensor], [tensor], call)

    @whole
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """This rank's part of the reduction, from one tensor per rank; they may differ in size."""
        output, parts = (outputs, inputs) if isinstance(outputs, Tensor) else (only(outputs), only(inputs))
        op = operation_of(opts)
        if not all(map(self._takes, [output, *parts])):
            return self._inner(output).reduce_scatter([output], [parts], options_of(c10d.ReduceScatterOptions(), opts))
        call = self._call(opts, timeout)
        pending = self._collectives.reduce_scatter_parts(output, parts, op, call)
        return self._work("reduce_scatter", pending, [output], parts, call)

    @whole
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """This rank's part of the reduction, from one tensor; the output may be that part of it."""
        op = operation_of(opts)
        if not (self._takes(output) and self._takes(whole)):
            return self._inner(output)._reduce_scatter_base(output, whole, opts or c10d.ReduceScatterOptions())
        call = self._call(opts)
        return self._work(
            "reduce_scatter", self._collectives.reduce_scatter(output, whole, op, call), [output], [whole], call
        )

    @whole
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """reduce_scatter_single() of several tensors."""
        op = operation_of(opts)
        if not all(map(self._takes, [*outputs, *inputs])):
            opts = opts or c10d.ReduceScatterOptions()
            return self._inner(outputs[0]).reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        call = self._call(opts)

        def start(output: Tensor, whole: Tensor) -> Pending:
            return self._collectives.reduce_scatter(output, whole, op, call)

        return self._work("reduce_scatter", each(start, outputs, inputs), outputs, inputs, call)

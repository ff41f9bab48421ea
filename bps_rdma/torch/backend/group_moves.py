# SPDX-License-Identifier: Apache-2.0
"""What a process group moves to all of its ranks, and its barriers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.operations.begun import whole
from bps_rdma.torch.backend.base_group import BaseGroup, Tensor, c10d, each, only, options_of, rooted
from bps_rdma.torch.backend.cuda_tensors import NCCL
from bps_rdma.torch.backend.pending import Pending


class Moves(BaseGroup):
    """A group's broadcasts, gathers to all, and barriers. They take any dtype."""

    @whole
    def broadcast(self, tensors: Any, opts: Any, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes that of one rank."""
        tensor = only(tensors)
        opts = rooted(c10d.BroadcastOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).broadcast([tensor], opts)
        call = self._call(opts, timeout)
        return self._work(
            "broadcast", self._collectives.broadcast(tensor, opts.rootRank, call), [tensor], [tensor], call
        )

    @whole
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, each in one of its own; they may differ in size."""
        flat = isinstance(inputs, Tensor)
        parts, tensor = (outputs, inputs) if flat else (only(outputs), only(inputs))
        if not all(map(self._takes, [tensor, *parts])):
            return self._inner(tensor).allgather([parts], [tensor], options_of(c10d.AllgatherOptions(), opts))
        call = self._call(opts)
        pending = self._collectives.all_gather_parts(parts, tensor, call)
        # Communication hooks index this by ranks, and then further, as they do with NCCL's futures.
        result = parts if pending.whole is None else pending.whole
        return self._work("all_gather", pending, [result], [tensor], call)

    @whole
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """allgather() of several tensors; `outputs` has a list of them for each rank."""
        if len(outputs) != self.size():
            raise InvalidArgumentError(f"{len(outputs)} lists for {self.size()} ranks", "pass one list for each rank")
        call = self._call(opts)

        def start(parts: tuple[Tensor, ...], tensor: Tensor) -> Pending:
            return self._collectives.all_gather_parts(parts, tensor, call)

        by_tensor = list(zip(*outputs, strict=True))
        return self._work("all_gather", each(start, by_tensor, inputs), outputs, inputs, call)

    @whole
    def all_gather_single(self, whole: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, in one large one. Its own may be a part of that one."""
        if not (self._takes(whole) and self._takes(tensor)):
            return self._inner(whole)._allgather_base(whole, tensor, opts or c10d.AllgatherOptions())
        call = self._call(opts)
        return self._work("all_gather", self._collectives.all_gather(whole, tensor, call), [whole], [tensor], call)

    @whole
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """all_gather_single() of several tensors."""
        if not all(map(self._takes, [*outputs, *inputs])):
            opts = opts or c10d.AllgatherOptions()
            return self._inner(outputs[0]).allgather_into_tensor_coalesced(outputs, inputs, opts)
        call = self._call(opts)

        def start(whole: Tensor, tensor: Tensor) -> Pending:
            return self._collectives.all_gather(whole, tensor, call)

        return self._work("all_gather", each(start, outputs, inputs), outputs, inputs, call)

    @whole
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Complete once every rank has called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda" and self.cuda_backend == NCCL:
            return self._get_backend(device).barrier(opts)
        call = self._call(opts, timeout)
        return self._work("barrier", self._collectives.barrier(call), [], [], call)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """barrier() in which rank 0 names the first rank that did not come in time, or with `wait_all_ranks` all."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._collectives.messages.monitored_barrier(seconds, wait_all_ranks)

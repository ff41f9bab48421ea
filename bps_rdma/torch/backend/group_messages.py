# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a process group send each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from bps_rdma.operations.begun import whole
from bps_rdma.torch.backend.base_group import BaseGroup, Tensor, c10d_core, only, root_of, rooted
from bps_rdma.torch.backend.work import BpsWork, ReceivedWork, done, settle


class GroupMessages(BaseGroup):
    """A group's messages between two ranks, or several of them. They take any dtype."""

    @whole
    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        """Every rank sends a part of its tensor to every rank."""
        if not (self._takes(output) and self._takes(whole)):
            return self._inner(whole).alltoall_base(
                output, whole, output_split_sizes, input_split_sizes, opts or c10d_core.AllToAllOptions()
            )
        call = self._call(opts, timeout)
        messages = self._collectives.messages
        pending = messages.all_to_all_single(output, whole, output_split_sizes, input_split_sizes, call)
        return self._work("all_to_all", pending, [output], [whole], call)

    @whole
    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Every rank sends a tensor to every rank."""
        if not all(map(self._takes, [*outputs, *inputs])):
            return self._inner(inputs[0]).alltoall(outputs, inputs, opts or c10d_core.AllToAllOptions())
        call = self._call(opts, timeout)
        return self._work(
            "all_to_all", self._collectives.messages.all_to_all(outputs, inputs, call), outputs, inputs, call
        )

    @whole
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """One rank gets every rank's tensor."""
        tensor = only(inputs)
        opts = rooted(c10d_core.GatherOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).gather(outputs, inputs, opts)
        parts = outputs[0] if outputs and not isinstance(outputs[0], Tensor) else outputs
        call = self._call(opts, timeout)
        pending = self._collectives.messages.gather(parts, tensor, root_of(opts), call)
        return self._work("gather", pending, [parts], [tensor], call)

    @whole
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Every rank gets one of the tensors of one rank."""
        tensor = only(outputs)
        opts = rooted(c10d_core.ScatterOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).scatter(outputs, inputs, opts)
        parts = inputs[0] if inputs and not isinstance(inputs[0], Tensor) else inputs
        call = self._call(opts, timeout)
        pending = self._collectives.messages.scatter(tensor, parts, root_of(opts), call)
        return self._work("scatter", pending, [tensor], parts, call)

    @whole
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803  torch's name
        """Sends a tensor to one rank."""
        tensor = only(tensors)
        if not self._takes(tensor):
            return self._inner(tensor).send(tensors, dstRank, tag)
        call = self._call_of_message()
        pending = self._collectives.messages.send(tensor, dstRank, tag, call)
        if call.awaited:
            settle(pending.handles, pending.finishes)
            return done()
        return self._kept(BpsWork("send", pending.handles, pending.finishes, [tensor], [tensor]))

    @whole
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803  torch's name
        """Receives a tensor from one rank."""
        tensor = only(tensors)
        if not self._takes(tensor):
            return self._inner(tensor).recv(tensors, srcRank, tag)
        call = self._call_of_message()
        pending = self._collectives.messages.receive(tensor, srcRank, tag, call)
        if call.awaited:
            settle(pending.handles, pending.finishes)
            return done()
        return self._kept(ReceivedWork("recv", pending.handles, pending.finishes, [tensor], [tensor], lambda: srcRank))

    @whole
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receives a tensor from any rank."""
        tensor = only(tensors)
        if not self._takes(tensor):
            return self._inner(tensor).recv_anysource(tensors, tag)
        call = self._call_of_message()
        pending, sender = self._collectives.messages.receive_from_any(tensor, tag, call)
        if call.awaited:
            settle(pending.handles, pending.finishes)
            work = ReceivedWork("recvAnySource", (), (), [tensor], [tensor], sender)
            work.wait()
            return work
        return self._kept(ReceivedWork("recvAnySource", pending.handles, pending.finishes, [tensor], [tensor], sender))

# SPDX-License-Identifier: Apache-2.0
"""Sums of tensors of GPUs that the GPUs of a host begin among themselves: BPS_GPU_HOST_SUM.

The ranks of a host reduce-scatter a tensor over NVLink, each sends its slices of the sum, together with the ranks of
other hosts that have the same ones (host_plan.py), and they gather the results. So what is copied to the host and sent
is 1/L of the tensor for each of L ranks; of a job on one host nothing is.

NCCL matches collectives by their order, and this library operations by their names. So only operations come here that
all ranks of a group start in one order: that is up to the caller. It is checked: the ranks of a host tell each other,
by a small operation, what each is about to sum, and nothing is summed before all have said the same. This also shows
that none of them is missing, before a GPU begins to wait for it.

After an error the ranks cannot know any more which sums the others have done. So the first one is the last: all further
sums of the group fail with it on this rank. Only a MismatchError in a group on one host does not: all ranks get it for
the same call, before anything is summed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from bps_rdma import Group, Handle, job
from bps_rdma.agreement import new_group
from bps_rdma.errors import BpsError, MismatchError, TransportError
from bps_rdma.kept_errors import keeping
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.operations.options import NONE
from bps_rdma.torch.transfer.device import Device
from bps_rdma.torch.transfer.host_collectives import HostCollectives
from bps_rdma.torch.transfer.host_plan import Plan
from bps_rdma.torch.transfer.host_watch import HostWatch
from bps_rdma.torch.transfer.operation import Layout, StagedOperation

_MOMENT = 1.0  # seconds; a thread that takes longer to end is left alone
_AHEAD = 2  # pieces of a tensor in progress

AnyHandle = Handle[Any] | StagedOperation
Send = Callable[[torch.Tensor, OperationOptions], AnyHandle]  # starts to replace a tensor by the sum over a group


class HostOperation(StagedOperation):
    """The handle of one sum.

    Args:
        sums: to which it belongs.
        source, target: flat, of one size; may be the same.
        options: of the operation, with a name.
        result: what wait() returns.
    """

    def __init__(
        self,
        sums: HostSums,
        source: torch.Tensor,
        target: torch.Tensor,
        options: OperationOptions,
        result: torch.Tensor,
    ) -> None:
        layout = Layout(1, source.numel(), [(0, source)], [(0, target)], source.dtype)
        patience = job.current().process.timeout_s if options.timeout is None else options.timeout
        name = str(options.name)
        super().__init__(sums.device, layout, _never, name, result, patience, lambda: sums.completed)
        self.sums, self.source, self.target, self.options = sums, source, target, options
        self.same: tuple[np.ndarray[Any, Any], AnyHandle] | None = None  # what tells whether all are about to do it

    def end(self, error: Exception | None = None) -> None:
        """Ends the operation, and with an error all that would follow."""
        super().end(error)
        if error is None or self._error is not error:  # it was over before
            return
        if not (isinstance(error, MismatchError) and self.sums.on_one_host):
            self.sums.fail(error)


@dataclass
class _Piece:
    """A part of a tensor: the whole of it, this rank's slices of the sum, and what sends these."""

    begin: int
    end: int
    whole: torch.Tensor
    own: torch.Tensor
    handles: list[AnyHandle]


class HostSums:
    """Those of one group and GPU, one after the other, in a thread.

    The ranks of the group make it together.

    Args:
        device: where the tensors are.
        members: the group.
        plan: of this rank.
        send: sends slices.
    """

    def __init__(self, device: Device, members: Group, plan: Plan, send: Send) -> None:
        self.device = device
        self.completed = 0  # pieces
        self._plan, self._send = plan, send
        self._size = members.size
        self._chunk_bytes = job.current().config.integer("BPS_GPU_CHUNK_BYTES")
        self._name = f"sums on hosts {members.id}"
        self.on_one_host = len(plan.owners[0]) == 1
        owners = [] if self.on_one_host else [*dict.fromkeys(plan.owners)]
        groups = {ranks: new_group(ranks, f"{self._name}, slice") for ranks in owners}
        self._groups = [groups[ranks] for ranks in plan.owners if groups]  # of each slice; none on one host
        self._peers = new_group(plan.peers, f"{self._name}, host")
        self._collectives = HostCollectives(device, self._peers, self._name) if len(plan.peers) > 1 else None
        self._watch = HostWatch(f"{self._name}, watch")
        self._stream = device.stream()
        self._failure: Exception | None = None
        self._turn = threading.Lock()  # the order of calls is that of the checks and of the queue
        self._failing = threading.Lock()
        self._queue: SimpleQueue[HostOperation | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bps_rdma host sums", daemon=True)
        self._thread.start()

    def start(
        self, source: torch.Tensor, target: torch.Tensor, options: OperationOptions, result: torch.Tensor
    ) -> HostOperation:
        """Puts a sum behind those that have been started before. Does not block.

        Args:
            source, target: flat, of one size; may be the same.
            options: of the operation, with a name.
            result: what wait() of the handle returns.

        Raises:
            BpsError: an earlier sum has failed; of its class.
        """
        operation = HostOperation(self, source, target, options, result)
        for tensor in (source, target):
            self.device.keep(tensor, self._stream)
        with self._turn:
            if self._failure is not None:
                raise self._again(operation.name)
            operation.same = self._ask(operation) if self._collectives is not None else None
            self._queue.put(operation)
        return operation

    def _ask(self, operation: HostOperation) -> tuple[np.ndarray[Any, Any], AnyHandle]:
        """Tells the other ranks of the host what comes next here, and asks the same of them."""
        name, op = operation.name, operation.options.op.name
        text = f"{name} {op} {operation.layout.dtype} {operation.layout.columns}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        numbers = np.array([number, -number], np.int64)
        options = OperationOptions(ReduceOp.max, f"{self._name}, order", operation.options.priority, self._peers)
        return numbers, start.reduce(numbers, numbers, options._replace(timeout=operation.options.timeout))

    def fail(self, error: Exception) -> None:
        """Notes the first error, and ends what GPUs do meanwhile: they may wait for a rank that does not come."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = error
        if self._collectives is not None:
            self._collectives.abort()

    def close(self) -> None:
        """Ends the thread. All sums are over, or never will be."""
        self._queue.put(None)
        self._watch.stop()
        self._thread.join(_MOMENT)
        if self._collectives is not None:
            if self._thread.is_alive():
                self._collectives.abort()
                self._thread.join(_MOMENT)
            self._collectives.close()

    def _again(self, name: str) -> Exception:
        error = self._failure
        problem = f"{name}: an earlier sum of the GPUs of this host has failed: "
        hint = "end the processes; BPS_GPU_HOST_SUM=0 lets each GPU send its whole tensors"
        if isinstance(error, BpsError):
            return type(error)(problem + error.message, hint)
        return TransportError(problem + str(error), hint)

    # ---- The thread

    def _run(self) -> None:
        keeping.for_this_thread()
        self.device.use()
        while (operation := self._queue.get()) is not None:
            try:
                self._sum(operation)
                operation.end()
            except BpsError as error:
                operation.end(error)
            except Exception as error:  # of torch, or of NCCL
                problem = f"{operation.name}: the GPUs of this host could not sum it: {error}"
                operation.end(TransportError(problem, "look into the logs of the other ranks of this host"))
            self._watch.turn_to(None)
            del operation
        if self._collectives is not None and self._failure is None:
            self._collectives.shut_down()

    def _sum(self, operation: HostOperation) -> None:
        if self._failure is not None:
            raise self._again(operation.name)
        if operation.same is not None:
            numbers, handle = operation.same
            handle.wait()
            if numbers[0] != -numbers[1]:
                raise MismatchError(
                    f"{operation.name}: another rank of this host has begun another sum, or one of another size, dtype "
                    "or reduction",
                    "let all ranks begin their sums in the same order, or set BPS_GPU_HOST_SUM=0",
                )
        # The order of collectives is the same on all ranks of the host, whatever arrives when.
        self._watch.turn_to(operation)
        self.device.order(self._stream, operation.ready)
        begun: deque[_Piece] = deque()
        for number, (begin, end) in enumerate(operation.layout.cut(self._chunk_bytes * self._plan.slices)):
            begun.append(self._begin(operation, number, begin, end))
            if len(begun) == _AHEAD:
                self._finish(operation, begun.popleft())
        while begun:
            self._finish(operation, begun.popleft())

    def _begin(self, operation: HostOperation, number: int, begin: int, end: int) -> _Piece:
        """Sums a piece on this host, and starts to send this rank's slices."""
        plan, options = self._plan, operation.options
        op = ReduceOp.sum if options.op is ReduceOp.average else options.op
        width = -(-(end - begin) // plan.slices)
        with self.device.computing(self._stream):
            whole = torch.empty(width * plan.slices, dtype=operation.source.dtype, device=operation.source.device)
            whole[: end - begin].copy_(operation.source[begin:end])
            whole[end - begin :].zero_()
            own = whole
            if self._collectives is not None:
                own = torch.empty_like(whole[: len(whole) // len(plan.peers)])
                self._collectives.reduce_scatter(own, whole, op)
            each = options._replace(op=op, awaited=False, compression=NONE)
            handles = [
                self._send(own[place * width : (place + 1) * width], each._replace(group=group, name=name))
                for place, group in enumerate(self._groups)
                for name in [f"{operation.name} {number}.{plan.first + place}"]
            ]
        return _Piece(begin, end, whole, own, handles)

    def _finish(self, operation: HostOperation, piece: _Piece) -> None:
        """Gathers the results of a piece, and copies them to the caller's tensor, unless the operation has failed."""
        with self.device.computing(self._stream):
            for handle in piece.handles:
                handle.wait()
            if operation.options.op is ReduceOp.average:
                piece.own.div_(self._size)
            if self._collectives is not None:
                self._collectives.all_gather(piece.whole, piece.own)
            # A rank that is lost now leaves this unfinished. Nothing may stand behind it that writes to the tensor.
            gathered = self.device.record(self.device.current())
        self.device.wait(gathered)

        def copy() -> None:
            with self.device.computing(self._stream):
                operation.target[piece.begin : piece.end].copy_(piece.whole[: piece.end - piece.begin])

        operation.receive(copy, lambda: self.device.record(self._stream))
        self.completed += 1


def _never(chunk: torch.Tensor, number: int) -> Handle[Any]:
    raise AssertionError("a sum of GPUs has no chunks of its own")

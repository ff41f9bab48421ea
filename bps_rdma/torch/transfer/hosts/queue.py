# SPDX-License-Identifier: Apache-2.0
"""Operations that the GPUs of a host begin among themselves, one after the other: BPS_GPU_HOST_SUM.

The ranks of a host reduce-scatter a tensor over NVLink, each sends its slices of the sum, together with the ranks of
other hosts that have the same ones (plan.py), and they gather the results. So what is copied to the host and sent is
1/L of the tensor for each of L ranks; of a job on one host nothing is. pieces.py has that, and the same for other kinds
of operations.

NCCL matches collectives by their order, and this library operations by their names. So only operations come here that
all ranks of a group start in one order: that is up to the caller. It is checked: the ranks of a host tell each other,
by a small operation, what each is about to do, and nothing is summed or moved before all have said the same. This also
shows that none of them is missing, before a GPU begins to wait for it.

After an error the ranks cannot know any more which operations the others have done. So the first one is the last: all
further operations of the group fail with it on this rank. Only a MismatchError in a group on one host does not: all
ranks get it for the same call, before anything is summed or moved.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from bps_rdma import Group, Handle, job
from bps_rdma.agreement import new_group
from bps_rdma.errors import BpsError, MismatchError, TransportError
from bps_rdma.kept_errors import keeping
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.torch.transfer import staged
from bps_rdma.torch.transfer.device import Device
from bps_rdma.torch.transfer.hosts.collectives import HostCollectives
from bps_rdma.torch.transfer.hosts.pieces import Hosts, Kind, Piece
from bps_rdma.torch.transfer.hosts.plan import Plan
from bps_rdma.torch.transfer.hosts.watch import HostWatch
from bps_rdma.torch.transfer.operation import StagedOperation

_MOMENT = 1.0  # seconds; a thread that takes longer to end is left alone
_AHEAD = 2  # pieces of a tensor in progress


class HostOperation(StagedOperation):
    """The handle of one operation.

    Args:
        queue: to which it belongs.
        kind: what it does with which tensors.
        options: of the operation, with a name.
        result: what wait() returns.
    """

    def __init__(self, queue: HostQueue, kind: Kind, options: OperationOptions, result: torch.Tensor) -> None:
        patience = job.current().process.timeout_s if options.timeout is None else options.timeout
        name = str(options.name)
        super().__init__(queue.device, kind.layout, _never, name, result, patience, lambda: queue.completed)
        self.queue, self.kind, self.options = queue, kind, options
        self.same: tuple[np.ndarray[Any, Any], staged.AnyHandle] | None = None  # tells whether all are about to do it

    def end(self, error: Exception | None = None) -> None:
        """Ends the operation, and with an error all that would follow."""
        super().end(error)
        if error is None or self._error is not error:  # it was over before
            return
        if not (isinstance(error, MismatchError) and self.queue.on_one_host):
            self.queue.fail(error)


class HostQueue:
    """The operations of one group and GPU, one after the other, in a thread.

    The ranks of the group make it together.

    Args:
        device: where the tensors are.
        place: the same in torch's terms.
        members: the group.
        plan: of this rank.
    """

    def __init__(self, device: Device, place: torch.device, members: Group, plan: Plan) -> None:
        self.device = device
        self.completed = 0  # pieces
        self.size = members.size
        self.takes_parts = plan.is_even
        self._chunk_bytes = job.current().config.integer("BPS_GPU_CHUNK_BYTES")
        self._name = f"sums on hosts {members.id}"
        self.on_one_host = len(plan.owners[0]) == 1
        groups: dict[tuple[int, ...], Group] = {}
        if not self.on_one_host:
            groups = {ranks: new_group(ranks, f"{self._name}, slice") for ranks in dict.fromkeys(plan.owners)}
        self._peers = new_group(plan.peers, f"{self._name}, host")
        self._collectives = HostCollectives(device, self._peers, self._name) if len(plan.peers) > 1 else None
        owners = [groups[ranks] for ranks in plan.owners if groups]
        self._hosts = Hosts(members, plan, owners, self._collectives, place)
        self._watch = HostWatch(f"{self._name}, watch")
        self._stream = device.stream()
        self._failure: Exception | None = None
        self._turn = threading.Lock()  # the order of calls is that of the checks and of the queue
        self._failing = threading.Lock()
        self._queue: SimpleQueue[HostOperation | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bps_rdma host sums", daemon=True)
        self._thread.start()

    def start(self, kind: Kind, options: OperationOptions, result: torch.Tensor) -> HostOperation:
        """Puts an operation behind those that have been started before. Does not block.

        Args:
            kind: what it does with which tensors.
            options: of the operation.
            result: what wait() of the handle returns.

        Raises:
            BpsError: an earlier one has failed; of its class.
        """
        layout = kind.layout
        name = options.name or staged.name_of(kind.name, layout.dtype, layout.rows * layout.columns)
        operation = HostOperation(self, kind, options._replace(name=name), result)
        for tensor in (kind.source, kind.target):
            self.device.keep(tensor, self._stream)
        with self._turn:
            if self._failure is not None:
                raise self._again(operation.name)
            operation.same = self._ask(operation) if self._collectives is not None else None
            self._queue.put(operation)
        return operation

    def _ask(self, operation: HostOperation) -> tuple[np.ndarray[Any, Any], staged.AnyHandle]:
        """Tells the other ranks of the host what comes next here, and asks the same of them."""
        options, layout = operation.options, operation.layout
        text = f"{operation.kind} {operation.name} {options.op.name} {layout.dtype} {layout.columns}"
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        numbers = np.array([number, -number], np.int64)
        asked = OperationOptions(ReduceOp.max, f"{self._name}, order", options.priority, self._peers, options.timeout)
        return numbers, start.reduce(numbers, numbers, asked)

    def fail(self, error: Exception) -> None:
        """Notes the first error, and ends what GPUs do meanwhile: they may wait for a rank that does not come."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = error
        if self._collectives is not None:
            self._collectives.abort()

    def close(self) -> None:
        """Ends the thread. All operations are over, or never will be."""
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
        problem = f"{name}: an earlier operation of the GPUs of this host has failed: "
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
                self._do(operation)
                operation.end()
            except BpsError as error:
                operation.end(error)
            except Exception as error:  # of torch, or of NCCL
                problem = f"{operation.name}: the GPUs of this host could not do it: {error}"
                operation.end(TransportError(problem, "look into the logs of the other ranks of this host"))
            self._watch.turn_to(None)
            del operation
        if self._collectives is not None and self._failure is None:
            self._collectives.shut_down()

    def _do(self, operation: HostOperation) -> None:
        if self._failure is not None:
            raise self._again(operation.name)
        if operation.same is not None:
            numbers, handle = operation.same
            handle.wait()
            if numbers[0] != -numbers[1]:
                raise MismatchError(
                    f"{operation.name}: another rank of this host has begun another operation, or one of another size, "
                    "dtype, reduction or root",
                    "let all ranks begin their operations in the same order, or set BPS_GPU_HOST_SUM=0",
                )
        # The order of collectives is the same on all ranks of the host, whatever arrives when.
        self._watch.turn_to(operation)
        self.device.order(self._stream, operation.ready)
        begun: deque[Piece] = deque()
        for number, ends in enumerate(operation.layout.cut(self._chunk_bytes * self._hosts.plan.slices)):
            options = operation.options._replace(name=f"{operation.name} {number}")
            with self.device.computing(self._stream):
                begun.append(operation.kind.begin(self._hosts, slice(*ends), options))
            if len(begun) == _AHEAD:
                self._finish(operation, begun.popleft())
        while begun:
            self._finish(operation, begun.popleft())

    def _finish(self, operation: HostOperation, piece: Piece) -> None:
        """Ends a piece, and copies the result to the caller's tensor, unless the operation has failed."""
        with self.device.computing(self._stream):
            for handle in piece.handles:
                handle.wait()
            operation.kind.finish(self._hosts, piece, operation.options.op)
            # A rank that is lost now leaves this unfinished. Nothing may stand behind it that writes to the tensor.
            finished = self.device.record(self.device.current())
        self.device.wait(finished)

        def deliver() -> None:
            with self.device.computing(self._stream):
                operation.kind.deliver(self._hosts, piece)

        operation.receive(deliver, lambda: self.device.record(self._stream))
        self.completed += 1


def _never(chunk: torch.Tensor, number: int) -> Handle[Any]:
    raise AssertionError("an operation of the GPUs of a host has no chunks of its own")

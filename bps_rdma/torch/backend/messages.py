# SPDX-License-Identifier: Apache-2.0
"""torch's operations that are messages between two ranks, or several of them; each returns what remains to be done.

They take dense tensors of any strides and dtype. Contiguous ones on the CPU are used in place, others through a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bps_rdma import Group, _core
from bps_rdma.errors import BpsError, DeadlineError, InvalidTensorError
from bps_rdma.handle import PythonHandle
from bps_rdma.operations import point_to_point
from bps_rdma.operations.begun import of_thread
from bps_rdma.operations.exchanges import exchange
from bps_rdma.operations.lanes import Content, Part, part_of
from bps_rdma.operations.messages import How, completed
from bps_rdma.operations.point_to_point import Subject
from bps_rdma.operations.receivers import ReceiveFromAny
from bps_rdma.torch.backend.pending import Call, Pending
from bps_rdma.torch.transfer import dense
from bps_rdma.torch.transfer.dense import Finish


class Messages:
    """The messages of one group.

    Args:
        rank: of this process in the group.
        ranks: worker ranks, in torch's order of the group.
        group: the core's group of the same ranks; None: all workers.
        prefix: of the names of this group's operations.
    """

    def __init__(self, rank: int, ranks: Sequence[int], group: Group | None, prefix: str) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._subject = Subject(prefix, 0, group)

    # ---- From one rank to another one

    def send(self, tensor: torch.Tensor, dst: int, tag: int, call: Call) -> Pending:
        """Sends a tensor to rank `dst` of the group."""
        start = partial(point_to_point.send, _source(tensor), None, self._worker(dst), self._tagged(tag))
        return _moved(start, (), call)

    def receive(self, tensor: torch.Tensor, src: int, tag: int, call: Call) -> Pending:
        """Fills a tensor with what rank `src` of the group sends."""
        part, finish = _target(tensor)
        start = partial(point_to_point.receive, part, None, self._worker(src), self._tagged(tag))
        return _moved(start, finish, call)

    def receive_from_any(self, tensor: torch.Tensor, tag: int, call: Call) -> tuple[Pending, Callable[[], int]]:
        """Fills a tensor with what any rank sends first. The second value gives that rank, once it is known."""
        part, finish = _target(tensor)
        begun: list[ReceiveFromAny] = []

        def start(how: How) -> ReceiveFromAny:
            begun.append(point_to_point.receive_from_any(part, self._tagged(tag), how))
            return begun[0]

        return _moved(start, finish, call), lambda: self._sender(begun[0])

    def _sender(self, receiver: ReceiveFromAny) -> int:
        return -1 if receiver.src is None else self._ranks.index(receiver.src)

    def _tagged(self, tag: int) -> Subject:
        return self._subject._replace(tag=tag) if tag else self._subject

    def _worker(self, rank: int) -> int:
        return self._ranks[rank] if 0 <= rank < len(self._ranks) else -1

    # ---- Among all

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], call: Call) -> Pending:
        """Sends each rank one of the inputs, and fills one of the outputs from each."""
        self._check(outputs, "outputs")
        self._check(inputs, "inputs")
        targets = [_target(output) for output in outputs]
        finishes = [one for _, finish in targets for one in finish]
        return self._all_to_all([part for part, _ in targets], [_source(each) for each in inputs], finishes, call)

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, rows: Sequence[int], rows_sent: Sequence[int], call: Call
    ) -> Pending:
        """all_to_all() of the parts of two tensors along their first dimension; no sizes: equal ones."""
        target, finishes = _target(output)
        intos = _cut(output, target, rows, len(self._ranks))
        return self._all_to_all(intos, _cut(whole, _source(whole), rows_sent, len(self._ranks)), finishes, call)

    def _all_to_all(self, intos: list[Part], outs: list[Part], finishes: Sequence[Finish], call: Call) -> Pending:
        own = _Own(intos[self._rank], outs[self._rank], "all_to_all")
        return self._exchange("all_to_all", self._others(outs), self._others(intos), finishes, call, own)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, call: Call) -> Pending:
        """Sends a tensor to rank `root`, which fills one of the outputs from each rank."""
        source = _source(tensor)
        if root != self._rank:
            return self._exchange("gather", {self._worker(root): source}, {}, (), call)
        self._check(outputs, "outputs")
        targets = [_target(output) for output in outputs]
        own = _Own(targets[root][0], source, "gather")
        finishes = [one for _, finish in targets for one in finish]
        return self._exchange("gather", {}, self._others([part for part, _ in targets]), finishes, call, own)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, call: Call) -> Pending:
        """Fills a tensor with one of the inputs of rank `root`."""
        target, finish = _target(output)
        if root != self._rank:
            return self._exchange("scatter", {}, {self._worker(root): target}, finish, call)
        self._check(inputs, "inputs")
        sources = [_source(each) for each in inputs]
        own = _Own(target, sources[root], "scatter")
        return self._exchange("scatter", self._others(sources), {}, finish, call, own)

    def monitored_barrier(self, seconds: float, wait_all_ranks: bool) -> None:
        """Returns once every rank has called it. Otherwise rank 0 says who has not; see torch's function.

        Raises:
            DeadlineError: in the words that torch's own tests look for.
        """
        call, milliseconds = Call(seconds, awaited=False), f"{1000 * seconds:g} ms"
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if seconds <= 0 and len(self._ranks) > 1:
            raise DeadlineError(f"Rank {self._rank} timed out in monitoredBarrier after 0 ms", "pass a longer timeout")
        if self._rank != 0:
            try:
                self._exchange("monitored_barrier", {self._ranks[0]: part_of(token, False)}, {}, (), call).handles[
                    0
                ].wait()
            except BpsError as error:
                raise DeadlineError(f"Rank {self._rank} timed out in monitoredBarrier after {milliseconds}") from error
            answer = self._exchange("monitored_barrier", {}, {self._ranks[0]: part_of(token, True)}, (), call)
            try:
                answer.handles[0].wait()
            except BpsError:
                token.fill_(1)
            if token.item():
                raise DeadlineError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    "send/recv from rank 0",
                    "look into the log of rank 0, which names the rank that did not come",
                )
            return
        self._monitor(token, call, wait_all_ranks, milliseconds)

    def _monitor(self, token: torch.Tensor, call: Call, wait_all_ranks: bool, milliseconds: str) -> None:
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        calls = {
            rank: self._exchange("monitored_barrier", {}, {self._ranks[rank]: _target(token.clone())[0]}, (), call)
            for rank in others
        }
        missing = []
        for rank, pending in calls.items():
            try:
                pending.handles[0].wait()
            except BpsError:
                missing.append(rank)
        token.fill_(bool(missing))
        came = {self._ranks[rank]: part_of(token, False) for rank in others if rank not in missing}
        with contextlib.suppress(BpsError):  # who is missing matters more
            self._exchange("monitored_barrier", came, {}, (), call).handles[0].wait()
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            who = f"Rank{'s' if len(named) > 1 or wait_all_ranks else ''} {', '.join(map(str, named))}"
            raise DeadlineError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds}")

    def _exchange(
        self,
        kind: str,
        outs: dict[int, Part],
        intos: dict[int, Part],
        finishes: Sequence[Finish],
        call: Call,
        own: _Own | None = None,
    ) -> Pending:
        def start(how: How) -> PythonHandle[Any]:
            handle = exchange(kind, outs, dict(intos), self._subject, how, lambda _: None)
            if own is not None:
                own.copy()
            return handle

        return _moved(start, finishes, call)

    def _others(self, parts: Sequence[Part]) -> dict[int, Part]:
        return {
            worker: part
            for place, (worker, part) in enumerate(zip(self._ranks, parts, strict=True))
            if place != self._rank
        }

    def _check(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != len(self._ranks):
            raise InvalidTensorError(
                f"{len(tensors)} {what} for {len(self._ranks)} ranks", "pass one tensor for each rank of the group"
            )


class _Own:
    """What this rank gives itself. It is copied while the messages are on their way.

    Raises:
        InvalidTensorError: it does not fit.
    """

    def __init__(self, target: Part, source: Part, kind: str) -> None:
        if target.content != source.content:
            raise InvalidTensorError(
                f"{kind}: this rank gives itself {source.content}, and expects {target.content}",
                "pass tensors of the same size and dtype",
            )
        self._target, self._source = target, source

    def copy(self) -> None:
        """Copies it."""
        if self._source.content.nbytes > 0:
            _core.copy_bytes(self._target.memory.address, self._source.memory.address, self._source.content.nbytes)


def _moved(start: Callable[[How], PythonHandle[Any]], finishes: Sequence[Finish], call: Call) -> Pending:
    """Messages in progress. Where the caller waits next, they only begin then, so that one call holds all of it.

    Nothing touches the caller's memory then after what a signal handler raises in that call.
    """
    if call.awaited:
        return Pending((), [partial(completed, start, How(0, call.seconds)), *finishes])
    return Pending((start(How(0, call.seconds, False, of_thread.begun)),), finishes)


def _source(tensor: torch.Tensor) -> Part:
    data = tensor.detach()
    return part_of((data if data.is_cpu else data.cpu()).contiguous().resolve_conj().resolve_neg(), False)


def _target(tensor: torch.Tensor) -> tuple[Part, Sequence[Finish]]:
    if tensor.is_cpu:
        data, finish = dense.filled(tensor)
        return part_of(data.detach(), True), finish
    dense.check_target(tensor)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return part_of(host, True), [lambda: dense.copy(tensor, host)]


def _cut(whole: torch.Tensor, described: Part, sizes: Sequence[int], ranks: int) -> list[Part]:
    """A tensor in parts along its first dimension, one for each rank. Described once: that takes longer than a message.

    Raises:
        InvalidTensorError: it cannot be cut so.
    """
    rows = whole.shape[0] if whole.dim() else 1
    if not sizes:
        if rows % ranks:
            raise InvalidTensorError(
                f"{rows} rows cannot be divided among {ranks} ranks", "pass the sizes of the parts"
            )
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise InvalidTensorError(
            f"the sizes {list(sizes)} are not those of {ranks} parts of {rows} rows",
            "pass one for each rank, whose sum is the first dimension",
        )
    (elements, nbytes, dtype), memory = described
    found, address = [], memory.address
    for count in sizes:
        size = nbytes * count // max(rows, 1)
        found.append(Part(Content(elements * count // max(rows, 1), size, dtype), memory.part(address, size, size)))
        address += size
    return found

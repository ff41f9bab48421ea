# SPDX-License-Identifier: Apache-2.0
"""What GPUs of a host do with one piece of an operation before a rank sends its share, and with what comes back.

| operation | on each host | between the ranks that have the same share | on each host |
|---|---|---|---|
| all-reduce | reduce-scatter of slices | all-reduce | all-gather |
| reduce_scatter | reduce-scatter: the parts of the ranks of one place each | reduce_scatter | |
| all_gather | | all_gather of the parts of the ranks of one place | all-gather |
| broadcast | on that of the root: a broadcast | broadcast of slices | on the others: all-gather |

A share is 1/L of a piece, with L ranks on the host. On one host nothing is sent. The GPUs of a host add its ranks, in
the order of their backend, and servers the sums of hosts, in the order of the ranks that send them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import NONE
from bps_rdma.torch.transfer import staged
from bps_rdma.torch.transfer.hosts.collectives import HostCollectives
from bps_rdma.torch.transfer.hosts.plan import Plan
from bps_rdma.torch.transfer.operation import Layout


@dataclass
class Hosts:
    """Who takes part.

    Attributes:
        members: the group.
        plan: of this rank.
        owners: of each slice of this rank, those that send it; none on one host.
        peers: what the ranks of this host do together; None: it has one.
        place: that of the tensors.
    """

    members: Group
    plan: Plan
    owners: Sequence[Group]
    peers: HostCollectives | None
    place: torch.device

    @cached_property
    def by_place(self) -> torch.Tensor:
        """Where the parts of the ranks of the first place, of the second, and so on, lie in a whole."""
        ranks = self.members.ranks
        return torch.tensor([ranks.index(rank) for rank in self.plan.by_place], device=self.place)

    @property
    def mine(self) -> int:
        """The number of this rank's part among those of its place."""
        return self.plan.owners[0].index(bps_rdma.rank())

    def slices(self, own: torch.Tensor, name: str) -> Iterator[tuple[torch.Tensor, Group, str]]:
        """The slices of a share that are sent, with the ranks that have them, and their names. None on one host."""
        parts = own.tensor_split(len(self.plan.owners))
        for number, (part, owners) in enumerate(zip(parts, self.owners, strict=False), self.plan.first):
            yield part, owners, f"{name}.{number}"


@dataclass
class Piece:
    """Columns of a tensor in memory of ours.

    Attributes:
        columns: which.
        whole: what all ranks of the host have, or will have.
        own: the share of this rank.
        handles: what sends it.
    """

    columns: slice
    whole: torch.Tensor
    own: torch.Tensor
    handles: Sequence[staged.AnyHandle] = ()


class Kind(ABC):
    """An operation of one kind. What it computes goes into the stream in which the calling thread computes.

    Args:
        source, target: flat; may be the same memory.
        rows: 1, or one for each rank of the group: the parts in the larger one of the two.
    """

    name: str

    def __init__(self, source: torch.Tensor, target: torch.Tensor, rows: int = 1) -> None:
        self.source, self.target, self.rows = source, target, rows
        columns = max(source.numel(), target.numel()) // rows
        self.layout = Layout(rows, columns, [(0, source)], [(0, target)], source.dtype)

    def __str__(self) -> str:
        """What is alike on all ranks."""
        return self.name

    @abstractmethod
    def begin(self, hosts: Hosts, columns: slice, options: OperationOptions) -> Piece:
        """What comes before this rank sends its share, which it starts.

        Args:
            hosts: who takes part.
            columns: the piece, in columns of the layout.
            options: of the operation, with the name of the piece.
        """

    @abstractmethod
    def finish(self, hosts: Hosts, piece: Piece, op: ReduceOp) -> None:
        """What comes when the share has come back, in memory of ours."""

    @abstractmethod
    def deliver(self, hosts: Hosts, piece: Piece) -> None:
        """Copies the result to the caller's tensor."""


class AllReduce(Kind):
    """Replaces a tensor by the reduction over all ranks."""

    name = "all_reduce"

    def begin(self, hosts: Hosts, columns: slice, options: OperationOptions) -> Piece:
        """See Kind."""
        source = self.source[columns]
        whole, own = _room_for_slices(source, hosts)
        whole[: len(source)].copy_(source)
        whole[len(source) :].zero_()
        if hosts.peers is not None:
            hosts.peers.reduce_scatter(own, whole, _without_mean(options.op))
        sent = _sent(options)
        handles = [
            staged.all_reduce(part, sent._replace(group=owners, name=name))
            for part, owners, name in hosts.slices(own, str(options.name))
        ]
        return Piece(columns, whole, own, handles)

    def finish(self, hosts: Hosts, piece: Piece, op: ReduceOp) -> None:
        """See Kind."""
        if op is ReduceOp.average:
            piece.own.div_(hosts.members.size)
        if hosts.peers is not None:
            hosts.peers.all_gather(piece.whole, piece.own)

    def deliver(self, hosts: Hosts, piece: Piece) -> None:
        """See Kind."""
        target = self.target[piece.columns]
        target.copy_(piece.whole[: len(target)])


class ReduceScatter(Kind):
    """Reduces a whole, of which each rank gets its part."""

    name = "reduce_scatter"

    def begin(self, hosts: Hosts, columns: slice, options: OperationOptions) -> Piece:
        """See Kind."""
        assert hosts.peers is not None
        whole = self.source.view(self.rows, -1)[:, columns].index_select(0, hosts.by_place).view(-1)
        own = torch.empty_like(whole[: len(whole) // len(hosts.plan.peers)])
        hosts.peers.reduce_scatter(own, whole, _without_mean(options.op))
        part = own.view(len(hosts.plan.hosts), -1)[hosts.mine]
        sent = _sent(options)
        handles = [staged.reduce_scatter(part, own, sent._replace(group=owners)) for owners in hosts.owners]
        return Piece(columns, own, part, handles)

    def finish(self, hosts: Hosts, piece: Piece, op: ReduceOp) -> None:
        """See Kind."""
        if op is ReduceOp.average:
            piece.own.div_(hosts.members.size)

    def deliver(self, hosts: Hosts, piece: Piece) -> None:
        """See Kind."""
        self.target[piece.columns].copy_(piece.own)


class AllGather(Kind):
    """Gathers the parts of all ranks in a whole."""

    name = "all_gather"

    def begin(self, hosts: Hosts, columns: slice, options: OperationOptions) -> Piece:
        """See Kind."""
        source = self.source[columns]
        own = torch.empty(len(hosts.plan.hosts) * len(source), dtype=source.dtype, device=source.device)
        part = own.view(len(hosts.plan.hosts), -1)[hosts.mine]
        part.copy_(source)
        sent = options._replace(awaited=False)
        handles = [staged.all_gather(own, part, sent._replace(group=owners), own) for owners in hosts.owners]
        return Piece(columns, own, own, handles)

    def finish(self, hosts: Hosts, piece: Piece, op: ReduceOp) -> None:
        """See Kind."""
        assert hosts.peers is not None
        piece.whole = torch.empty(
            len(piece.own) * len(hosts.plan.peers), dtype=piece.own.dtype, device=piece.own.device
        )
        hosts.peers.all_gather(piece.whole, piece.own)

    def deliver(self, hosts: Hosts, piece: Piece) -> None:
        """See Kind."""
        rows = self.target.view(self.rows, -1)[:, piece.columns]
        rows.index_copy_(0, hosts.by_place, piece.whole.view(self.rows, -1))


class Broadcast(Kind):
    """Replaces a tensor by that of one rank.

    Args:
        tensor: flat.
        root: worker rank.
    """

    name = "broadcast"

    def __init__(self, tensor: torch.Tensor, root: int) -> None:
        super().__init__(tensor, tensor)
        self._root = root

    def __str__(self) -> str:
        """What is alike on all ranks."""
        return f"{self.name} from {self._root}"

    def begin(self, hosts: Hosts, columns: slice, options: OperationOptions) -> Piece:
        """See Kind."""
        source, plan = self.source[columns], hosts.plan
        whole, own = _room_for_slices(source, hosts)
        if self._root in plan.peers:
            if self._root == bps_rdma.rank():
                whole[: len(source)].copy_(source)
            if hosts.peers is not None:
                hosts.peers.broadcast(whole, plan.peers.index(self._root))
            own = whole[plan.first * len(whole) // plan.slices :][: len(own)]
        sent = options._replace(awaited=False)
        handles = [
            staged.broadcast(part, root, sent._replace(group=owners, name=name), part)
            for (part, owners, name), root in zip(
                hosts.slices(own, str(options.name)), plan.owners_beside(self._root), strict=False
            )
        ]
        return Piece(columns, whole, own, handles)

    def finish(self, hosts: Hosts, piece: Piece, op: ReduceOp) -> None:
        """See Kind."""
        if hosts.peers is not None and self._root not in hosts.plan.peers:
            hosts.peers.all_gather(piece.whole, piece.own)

    def deliver(self, hosts: Hosts, piece: Piece) -> None:
        """See Kind."""
        if self._root != bps_rdma.rank():
            target = self.target[piece.columns]
            target.copy_(piece.whole[: len(target)])


def _room_for_slices(piece: torch.Tensor, hosts: Hosts) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for a piece that is cut into slices, and for those of this rank."""
    plan = hosts.plan
    width = -(-len(piece) // plan.slices)
    whole = torch.empty(width * plan.slices, dtype=piece.dtype, device=piece.device)
    return whole, whole if hosts.peers is None else torch.empty_like(whole[: len(whole) // len(plan.peers)])


def _sent(options: OperationOptions) -> OperationOptions:
    """Those of a sum between hosts: a mean is divided in the end, and nothing is compressed."""
    return options._replace(op=_without_mean(options.op), awaited=False, compression=NONE)


def _without_mean(op: ReduceOp) -> ReduceOp:
    return ReduceOp.sum if op is ReduceOp.average else op

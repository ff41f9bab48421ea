# SPDX-License-Identifier: Apache-2.0
"""Assigns the state of each parameter to a rank, and broadcasts updated parameters from their owners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.torch.broadcast_objects import Transfer, broadcast_tensors, bytes_of, nbytes
from bps_rdma.torch.returned import others_moved, sharers
from bps_rdma.torch.transfer import members_of, zeros_beside
from bps_rdma.torch.transfer.flat_bytes import flat_bytes

# Parameters up to this size are sent together with others of their owner: twice as fast as one by one. Above it the
# copies cost more than the messages.
_SMALL_BYTES = 64 << 10


class Shards:
    """The keepers of each parameter's state; the same on all ranks that add the same parameters in the same order.

    The first of a parameter's keepers owns it: its value is the one that the others get.
    """

    def __init__(self, group: Group | None, copies: int = 1, hosts: Mapping[int, bytes] | None = None) -> None:
        """Assigns nothing yet.

        Args:
            group: who keeps states; None: all workers.
            copies: how many ranks keep each.
            hosts: by rank: its host, if copies are to lie on several; a host may be lost as a whole.
        """
        self._members = members_of(group)
        self._copies = copies
        self._hosts = hosts or {}
        self._keepers: dict[torch.Tensor, tuple[int, ...]] = {}  # worker ranks
        # The memory in which the small parameters of an owner are sent together, by owner and device.
        self._flats: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._forget_loads()

    def _forget_loads(self) -> None:
        # Frozen parameters have no state: they are balanced by themselves, in case they are unfrozen later.
        self._loads = {frozen: dict.fromkeys(self._members.ranks, 0) for frozen in (False, True)}
        self._owned = dict.fromkeys(self._members.ranks, 0)  # bytes that each rank sends after a step

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Assigns each to the ranks with the fewest bytes so far, the largest first."""
        new = [param for param in dict.fromkeys(params) if param not in self._keepers]
        for param in sorted(new, key=nbytes, reverse=True):  # stable: equal ones in their order
            self._assign(param, ())

    def reassign(
        self, members: Group, held: Mapping[torch.Tensor, Sequence[int]], hosts: Mapping[int, bytes] | None = None
    ) -> None:
        """Assigns all anew, to ranks that hold their state already unless that gives a rank more than its share.

        Args:
            members: who there is now.
            held: by parameter: the ranks that hold its state.
            hosts: as for a new one.
        """
        self._members = members
        self._hosts = hosts or {}
        self._flats.clear()  # the names of a view end with it
        self._forget_loads()
        copies = min(self._copies, members.size)
        share = {True: 0, False: 0}
        for param in self._keepers:
            share[not param.requires_grad] += nbytes(param) * copies
        for param in sorted(self._keepers, key=nbytes, reverse=True):
            load = self._loads[not param.requires_grad]
            most = -(-share[not param.requires_grad] // members.size) - nbytes(param)
            self._assign(param, [rank for rank in held[param] if load[rank] <= most])

    def _assign(self, param: torch.Tensor, preferred: Sequence[int]) -> None:
        load = self._loads[not param.requires_grad]
        keepers: list[int] = []
        used: set[bytes | None] = set()
        for _ in range(min(self._copies, len(load))):
            rank = min(  # the lowest rank of equal ones
                (rank for rank in load if rank not in keepers),
                key=lambda rank: (self._hosts.get(rank) in used, rank not in preferred, load[rank]),
            )
            keepers.append(rank)
            used.add(self._hosts.get(rank))
        for rank in keepers:
            load[rank] += nbytes(param)
        keepers.sort(key=self._owned.__getitem__)
        self._owned[keepers[0]] += nbytes(param)
        self._keepers[param] = tuple(keepers)

    def drop(self, params: Iterable[torch.Tensor]) -> None:
        """Undoes add()."""
        for param in params:
            keepers = self._keepers.pop(param, ())
            for rank in keepers:
                self._loads[not param.requires_grad][rank] -= nbytes(param)
            if keepers:
                self._owned[keepers[0]] -= nbytes(param)

    @property
    def params(self) -> list[torch.Tensor]:
        """All parameters, in the same order on all ranks."""
        return list(self._keepers)

    def keepers(self, param: torch.Tensor) -> tuple[int, ...]:
        """The worker ranks that keep its state, the owner first."""
        return self._keepers[param]

    def mine(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those whose state this rank keeps."""
        rank = bps_rdma.rank()
        return [param for param in params if rank in self._keepers[param]]

    def broadcast(self) -> None:
        """Overwrites every parameter that can have changed by its owner's. Every rank of the group must call it."""
        if self._members.size == 1:
            return
        rank = bps_rdma.rank()
        alone: list[Transfer] = []
        together: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for place, (param, (owner, *_)) in enumerate(self._keepers.items()):
            if not param.requires_grad and param.grad is None:
                continue  # no optimizer touches it
            size = nbytes(param)
            if size <= _SMALL_BYTES:
                together.setdefault((owner, param.device), []).append(param)
            else:
                alone.append(Transfer(f"ShardedOptimizer.{place}.{size}", owner, param))
        packs: list[Transfer] = []
        for number, ((owner, device), params) in enumerate(together.items()):
            size = sum(nbytes(param) for param in params)
            flat = self._flats.get((owner, device))
            if flat is None or flat.numel() != size:  # kept from step to step: servers of this host have it mapped
                flat = self._flats[owner, device] = zeros_beside(params[0], size, torch.uint8)
            if owner == rank:
                torch.cat([_bytes(param) for param in params], out=flat)
            packs.append(Transfer(f"ShardedOptimizer.small.{number}.{owner}.{size}", owner, flat))
        broadcast_tensors([*packs, *alone], self._members, in_order=True)
        others_moved(lambda: sum(each.tensor.nbytes for each in (*packs, *alone)) // sharers())
        for pack, params in zip(packs, together.values(), strict=True):
            if pack.root != rank:
                _unpack(pack.tensor, params)


def _bytes(param: torch.Tensor) -> torch.Tensor:
    own = bytes_of(param)
    return flat_bytes(param.detach().contiguous()) if own is None else own


def _unpack(pack: torch.Tensor, params: Sequence[torch.Tensor]) -> None:
    parts = torch.split(pack, [nbytes(param) for param in params])
    with torch.no_grad():
        for param, part in zip(params, parts, strict=True):
            own = bytes_of(param)
            if own is None:
                # A part may begin at any byte; a view in another dtype needs one of its own.
                param.copy_(part.clone().view(param.dtype).view(param.shape))
            else:
                own.copy_(part)
                torch.autograd.graph.increment_version(param)

"""Which rank owns which parameter, and how updated parameters get from their owners to everybody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.torch.exchange import members_of
from bps_rdma.torch.spread import Transfer, bytes_of, spread_tensors

# Parameters up to this size travel together with others of their owner: twice as fast as one by one, where above it
# the copies cost more than the messages.
_SMALL_BYTES = 64 << 10


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


class Shards:
    """The owners, as worker ranks; the same on all ranks that add the same parameters in the same order."""

    def __init__(self, group: Group | None) -> None:
        self._members = members_of(group)
        self._owners: dict[torch.Tensor, int] = {}
        self._flats: dict[int, torch.Tensor] = {}  # by owner: where its small parameters travel together
        # What is frozen has no state: it is balanced by itself, for the day when it is not frozen any more.
        self._loads = {frozen: dict.fromkeys(self._members.ranks, 0) for frozen in (False, True)}

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Gives each to the rank that has least so far, the largest first."""
        new = [param for param in dict.fromkeys(params) if param not in self._owners]
        for param in sorted(new, key=nbytes, reverse=True):  # stable: equal ones in their order
            load = self._loads[not param.requires_grad]
            owner = min(load, key=load.__getitem__)
            load[owner] += nbytes(param)
            self._owners[param] = owner

    def drop(self, params: Iterable[torch.Tensor]) -> None:
        """Undoes add()."""
        for param in params:
            owner = self._owners.pop(param, None)
            if owner is not None:
                self._loads[not param.requires_grad][owner] -= nbytes(param)

    def owner(self, param: torch.Tensor) -> int:
        """The worker rank that has its state."""
        return self._owners[param]

    def mine(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that this rank owns."""
        rank = bps_rdma.rank()
        return [param for param in params if self._owners[param] == rank]

    def spread(self) -> None:
        """Overwrites every parameter that can have changed by its owner's. Every rank of the group must call it."""
        if self._members.size == 1:
            return
        rank = bps_rdma.rank()
        alone: list[Transfer] = []
        together: dict[int, list[torch.Tensor]] = {}
        for place, (param, owner) in enumerate(self._owners.items()):
            if not param.requires_grad and param.grad is None:
                continue  # no optimizer touches it
            size = nbytes(param)
            if size <= _SMALL_BYTES:
                together.setdefault(owner, []).append(param)
            else:
                alone.append(Transfer(f"ShardedOptimizer.{place}.{size}", owner, param))
        packs: list[Transfer] = []
        for owner, params in together.items():
            flat = self._flat(owner, sum(nbytes(param) for param in params))
            if owner == rank:
                _pack(params, flat)
            packs.append(Transfer(f"ShardedOptimizer.small.{owner}.{flat.numel()}", owner, flat))
        spread_tensors([*packs, *alone], self._members)
        for pack in packs:
            if pack.root != rank:
                _unpack(pack.tensor, together[pack.root])

    def _flat(self, owner: int, size: int) -> torch.Tensor:
        """Kept from step to step: the servers of this host have it mapped."""
        flat = self._flats.get(owner)
        if flat is None or flat.numel() != size:
            flat = self._flats[owner] = torch.from_numpy(bps_rdma.empty(size, "uint8"))
        return flat


def _pack(params: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    parts = []
    for param in params:
        own = bytes_of(param)
        parts.append(param.detach().cpu().contiguous().view(-1).view(torch.uint8) if own is None else own)
    torch.cat(parts, out=flat)


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

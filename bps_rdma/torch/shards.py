# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which parameter, and the broadcast of updated parameters from their owners to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.torch.broadcast_objects import Transfer, broadcast_tensors, bytes_of
from bps_rdma.torch.transfer import members_of, zeros_beside

# Parameters up to this size are sent together with others of their owner: twice as fast as one by one. Above it the
# copies cost more than the messages.
_SMALL_BYTES = 64 << 10


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


class Shards:
    """The owners, as worker ranks; the same on all ranks that add the same parameters in the same order."""

    def __init__(self, group: Group | None) -> None:
        self._members = members_of(group)
        self._owners: dict[torch.Tensor, int] = {}
        # By owner and device: where its small parameters are sent together.
        self._flats: dict[tuple[int, torch.device], torch.Tensor] = {}
        # Frozen parameters have no state: they are balanced by themselves, in case they are unfrozen later.
        self._loads = {frozen: dict.fromkeys(self._members.ranks, 0) for frozen in (False, True)}

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Assigns each to the rank with the fewest bytes so far, the largest first."""
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

    def broadcast(self) -> None:
        """Overwrites every parameter that can have changed by its owner's. Every rank of the group must call it."""
        if self._members.size == 1:
            return
        rank = bps_rdma.rank()
        alone: list[Transfer] = []
        together: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for place, (param, owner) in enumerate(self._owners.items()):
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
        broadcast_tensors([*packs, *alone], self._members)
        for pack, params in zip(packs, together.values(), strict=True):
            if pack.root != rank:
                _unpack(pack.tensor, params)


def _bytes(param: torch.Tensor) -> torch.Tensor:
    own = bytes_of(param)
    return param.detach().contiguous().view(-1).view(torch.uint8) if own is None else own


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

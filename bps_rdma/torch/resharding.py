# SPDX-License-Identifier: Apache-2.0
"""The shards of an optimizer in a new view: who holds what, who keeps it from now on, and what has to move for that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import BpsError
from bps_rdma.hosts import host_identity
from bps_rdma.settings import config_with
from bps_rdma.torch.broadcast_objects import Transfer, broadcast_objects, broadcast_tensors, nbytes, windows
from bps_rdma.torch.shards import Shards


def gather_hosts(members: Group) -> dict[int, bytes]:
    """The identity of each rank's host, by rank. A collective call."""
    own = config_with({}).text("BPS_HOST_ID") or host_identity()
    mine = np.frombuffer(hashlib.sha256(own.encode()).digest()[:16], np.uint8)
    rows = bps_rdma.all_gather(mine, name="ShardedOptimizer.hosts", group=members).reshape(members.size, -1)
    return {rank: row.tobytes() for rank, row in zip(members.ranks, rows, strict=True)}


def gather_holders(
    params: Sequence[torch.Tensor], held: set[torch.Tensor], steps: int, members: Group
) -> tuple[dict[torch.Tensor, list[int]], int]:
    """Returns the ranks that hold each parameter's state, and how many steps that has seen. A collective call.

    Raises:
        BpsError: ranks that hold states have made different numbers of steps; on all ranks.
    """
    mine = np.array([steps, *(param in held for param in params)], np.int64)
    everybody = bps_rdma.all_gather(mine, name=f"ShardedOptimizer.held.{len(mine)}", group=members)
    rows = everybody.reshape(members.size, -1)
    made = {rank: int(row[0]) for rank, row in zip(members.ranks, rows, strict=True) if row[1:].any()}
    if len(set(made.values())) > 1:
        told = ", ".join(f"{steps} on rank {rank}" for rank, steps in made.items())
        raise BpsError(
            f"the ranks have made different numbers of optimizer steps: {told}",
            "call step() on all ranks, or load one checkpoint on all of them",
        )
    holders = {
        param: [rank for rank, row in zip(members.ranks, rows, strict=True) if row[1 + place]]
        for place, param in enumerate(params)
    }
    return holders, next(iter(made.values()), 0)


def move_states(
    holders: dict[torch.Tensor, list[int]], shards: Shards, state: dict[torch.Tensor, Any], members: Group
) -> dict[torch.Tensor, Any]:
    """Returns the state that this rank keeps from now on and did not hold, by parameter. A collective call.

    Args:
        holders: as gather_holders() gives them; the first one sends.
        shards: who keeps what from now on.
        state: what this rank holds.
        members: who takes part.
    """
    rank = bps_rdma.rank()
    params = shards.params
    moving = [
        place
        for place, param in enumerate(params)
        if holders[param] and not set(shards.keepers(param)) <= set(holders[param])
    ]
    found: dict[torch.Tensor, Any] = {}
    for window in windows(moving, lambda place: params[place]):
        roots = sorted({holders[params[place]][0] for place in window})
        own = {
            place: state[params[place]]
            for place in window
            if holders[params[place]][0] == rank and params[place] in state
        }
        parts = broadcast_objects(own, roots, "ShardedOptimizer.moved", members)
        for root, part in parts.items():
            for place, value in part.items():
                param = params[place]
                if root != rank and rank in shards.keepers(param) and rank not in holders[param]:
                    found[param] = value
    return found


def send_parameters(holders: dict[torch.Tensor, list[int]], members: Group) -> None:
    """Overwrites every parameter by the value of a rank that holds its state. Collective."""
    broadcast_tensors(
        [
            Transfer(f"ShardedOptimizer.value.{place}.{nbytes(param)}", ranks[0], param)
            for place, (param, ranks) in enumerate(holders.items())
            if ranks
        ],
        members,
    )


class Before:
    """An optimizer's parameters, their state and options as they are now, to go back to."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._values = {param: param.detach().clone() for param in params}
        self._state = {
            param: (optimizer.state[param], _copy(optimizer.state[param]))
            for param in params
            if param in optimizer.state
        }
        self._options = [
            {key: (value, _copy(value)) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Goes back, in the tensors that there were; the optimizer has the same parameters as then."""
        for param, value in self._values.items():
            param.copy_(value)
            optimizer.state.pop(param, None)
        optimizer.state.update({param: _restored(*pair) for param, pair in self._state.items()})
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update({key: _restored(*pair) for key, pair in options.items()})


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value


def _restored(value: Any, copy: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.copy_(copy)
    if isinstance(value, dict):
        kept = {key: value.get(key, each) for key, each in copy.items()}
        value.clear()
        value.update({key: _restored(kept[key], each) for key, each in copy.items()})
        return value
    return copy

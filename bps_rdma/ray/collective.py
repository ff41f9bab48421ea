# SPDX-License-Identifier: Apache-2.0
"""A backend of ray.util.collective: groups of actors, whose arrays move by bps_rdma.

bps_rdma.ray.collective.register()  # in the driver and in every actor
ray.util.collective.init_collective_group(world_size, rank, backend="bps", group_name="g")

The first group of a process is a job of its own, in which every member is also a server; members of bps_rdma.ray.run()
are in a job already. Later groups consist of members of the same job. Each actor makes its calls in the same order, by
one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import ray.util.collective  # noqa: F401  # registers Ray's own backends
from ray.util.collective import types
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

import bps_rdma
from bps_rdma import arrays
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.operations.options import ReduceName
from bps_rdma.ray import moves, rendezvous

NAME = "BPS"


def register() -> None:
    """Makes the backend known to ray.util.collective in this process. Calling it again changes nothing.

    It can be given as `runtime_env={"worker_process_setup_hook": "bps_rdma.ray.collective.register"}`, too.
    """
    if not _global_registry.is_registered(NAME):
        register_collective_backend(NAME, BpsGroup)


_groups: set[str] = set()  # of this process, in the job that the first of them has joined


class BpsGroup(BaseGroup):  # type: ignore[misc]  # Ray is not checked
    """One group. Ray passes each array in a list of one, because a process could have several GPUs."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Waits for the other members, and joins their job unless this process is in it.

        Raises:
            InvalidArgumentError: some members are in a job and others are not, or in another one.
            DeadlineError: members are missing.
        """
        super().__init__(world_size, rank, group_name)
        found = rendezvous.meet(group_name, world_size, rank)
        self._group, self._ranks = found.group, found.ranks
        self._pairs: dict[int, bps_rdma.Group] = {}
        if found.joined or _groups:
            _groups.add(group_name)

    @classmethod
    def backend(cls) -> str:
        """The name that it is registered by."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether groups can be made: wherever this module can be imported."""
        return True

    def destroy_group(self) -> None:
        """The last group of a process leaves the job that the first one has joined."""
        if self._group_name in _groups:
            _groups.remove(self._group_name)
            if not _groups:
                bps_rdma.shutdown()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        """Replaces the array by the reduction over all members."""
        array = _only(tensor)
        moves.all_reduce(array, array, _op(allreduce_options), self._group)

    def reduce(self, tensor: list[Any], reduce_options: Any = types.ReduceOptions) -> None:
        """Replaces the array of one member by the reduction over all."""
        array = _only(tensor)
        result = array if reduce_options.root_rank == self._rank else arrays.empty_like(array)  # theirs stay
        moves.all_reduce(array, result, _op(reduce_options), self._group)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = types.BroadcastOptions) -> None:
        """Replaces the array of all members by that of one."""
        array = _only(tensor)
        moves.broadcast(array, self._ranks[broadcast_options.root_rank], self._group)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = types.AllGatherOptions
    ) -> None:
        """Replaces the arrays of the list by those of the members, in rank order."""
        del allgather_options
        own, parts = _only(tensor), self._of_members(_only(tensor_list))
        whole = moves.rows(own, self._world_size)
        _check_shapes(own, parts)
        moves.all_gather(whole, own, self._group)
        for place, part in zip(self._places(), parts, strict=True):
            part[...] = whole[place]

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[list[Any]],
        reducescatter_options: Any = types.ReduceScatterOptions,
    ) -> None:
        """Replaces the array by the reduction of those that have this member's place in the lists of all members."""
        own, parts = _only(tensor), self._of_members(_only(tensor_list))
        whole = moves.rows(own, self._world_size)
        _check_shapes(own, parts)
        for place, part in zip(self._places(), parts, strict=True):
            whole[place] = part
        moves.reduce_scatter(own, whole, _op(reducescatter_options), self._group)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Sends the array to another member."""
        self._between(_only(tensor), self._rank, send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Replaces the array by one that another member sends."""
        self._between(_only(tensor), recv_options.src_rank, self._rank)

    def barrier(self, barrier_options: Any = types.BarrierOptions) -> None:
        """Waits for all members."""
        del barrier_options
        bps_rdma.barrier(self._group)

    def _between(self, array: Any, source: int, target: int) -> None:
        """Of two members, one broadcasts to the other."""
        peer = target if source == self._rank else source
        if peer not in self._pairs:
            ranks = [self._ranks[self._rank], self._ranks[peer]]
            self._pairs[peer] = bps_rdma.new_group(ranks, name=f"ray.{self._group_name}.pair")
        name = f"{source}-{target}.{str(array.dtype).removeprefix('torch.')}.{math.prod(array.shape)}"
        moves.broadcast(array, self._ranks[source], self._pairs[peer], name)

    def _places(self) -> list[int]:
        """Of each member: its place in the group of bps_rdma, which is in the order of the job's ranks."""
        return [self._group.ranks.index(rank) for rank in self._ranks]

    def _of_members(self, parts: Sequence[Any]) -> Sequence[Any]:
        if len(parts) != self._world_size:
            raise InvalidArgumentError(
                f"the list has {len(parts)} arrays, the group {self._world_size} members", "pass one array per member"
            )
        return parts


def _only(listed: Sequence[Any]) -> Any:
    if len(listed) != 1:
        raise InvalidArgumentError(
            f"{len(listed)} arrays were passed for this process", "use the calls without _multigpu in their name"
        )
    return listed[0]


def _op(options: Any) -> ReduceName:
    return cast(ReduceName, str(options.reduceOp.name).lower())  # sum, product, min, max: the names are ours, too


def _check_shapes(own: Any, parts: Sequence[Any]) -> None:
    for part in parts:
        if tuple(part.shape) != tuple(own.shape) or part.dtype != own.dtype:
            raise InvalidTensorError(
                f"the list has an array of shape {tuple(part.shape)} and {part.dtype}, beside one of "
                f"{tuple(own.shape)} and {own.dtype}",
                "arrays of one call must be alike",
            )

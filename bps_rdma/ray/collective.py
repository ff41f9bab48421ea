# SPDX-License-Identifier: Apache-2.0
"""A backend of ray.util.collective: groups of actors, whose arrays move by bps_rdma.

bps_rdma.ray.collective.register()  # in the driver and in every actor
ray.util.collective.init_collective_group(world_size, rank, backend="bps", group_name="g")

The first group of a process is a job of its own, in which every member is also a server; members of bps_rdma.ray.run()
are in a job already. Later groups consist of members of the same job. Each actor makes its calls in the same order, by
one thread.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import ray
import ray.util.collective  # registers Ray's own backends
from ray.experimental import internal_kv
from ray.util.collective import types
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

import bps_rdma
from bps_rdma import Group, arrays, job
from bps_rdma.errors import DeadlineError, InvalidArgumentError, InvalidTensorError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import ReduceName
from bps_rdma.ray.placement import without_identity
from bps_rdma.settings import config_with

NAME = "BPS"


def register() -> None:
    """Makes the backend known to ray.util.collective in this process. Calling it again changes nothing.

    It can be given as `runtime_env={"worker_process_setup_hook": "bps_rdma.ray.collective.register"}`, too.
    """
    if not _global_registry.is_registered(NAME):
        register_collective_backend(NAME, BpsGroup)


_groups: set[str] = set()  # the groups of this process, in the job that the first of them has joined


class BpsGroup(BaseGroup):  # type: ignore[misc]  # Ray is not checked
    """One group. Ray passes each array in a list of one, because a process could have several GPUs."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Waits for the other members, and joins their job unless this process is in it.

        Raises:
            InvalidArgumentError: some members are in a job and others are not, or in another one.
            DeadlineError: members are missing.
        """
        super().__init__(world_size, rank, group_name)
        found = _meet(group_name, world_size, rank)
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
        """Returns True: groups can be made wherever this module can be imported."""
        return True

    def destroy_group(self) -> None:
        """Leaves the job that the first group of this process has joined, if this is the last group."""
        if self._group_name in _groups:
            _groups.remove(self._group_name)
            if not _groups:
                bps_rdma.shutdown()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        """Replaces the array by the reduction over all members."""
        array = _only(tensor)
        _all_reduce(array, array, _op(allreduce_options), self._group)

    def reduce(self, tensor: list[Any], reduce_options: Any = types.ReduceOptions) -> None:
        """Replaces the array of one member by the reduction over all."""
        array = _only(tensor)
        result = array if reduce_options.root_rank == self._rank else arrays.empty_like(array)  # theirs stay
        _all_reduce(array, result, _op(reduce_options), self._group)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = types.BroadcastOptions) -> None:
        """Replaces the array of all members by that of one."""
        array = _only(tensor)
        _broadcast(array, self._ranks[broadcast_options.root_rank], self._group)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = types.AllGatherOptions
    ) -> None:
        """Replaces the arrays of the list by those of the members, in rank order."""
        del allgather_options
        own, parts = _only(tensor), self._of_members(_only(tensor_list))
        whole = _rows(own, self._world_size)
        _check_shapes(own, parts)
        _all_gather(whole, own, self._group)
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
        whole = _rows(own, self._world_size)
        _check_shapes(own, parts)
        for place, part in zip(self._places(), parts, strict=True):
            whole[place] = part
        _reduce_scatter(own, whole, _op(reducescatter_options), self._group)

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
        """Moves an array between two members: one broadcasts to the other."""
        peer = target if source == self._rank else source
        if peer not in self._pairs:
            ranks = [self._ranks[self._rank], self._ranks[peer]]
            self._pairs[peer] = bps_rdma.new_group(ranks, name=f"ray.{self._group_name}.pair")
        name = f"{source}-{target}.{str(array.dtype).removeprefix('torch.')}.{math.prod(array.shape)}"
        _broadcast(array, self._ranks[source], self._pairs[peer], name)

    def _places(self) -> list[int]:
        """The place of each member in the group of bps_rdma, which is in the order of the job's ranks."""
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


# ---- Operations on numpy arrays, and on torch's tensors on the CPU or a GPU
#
# All wait for the end. Gathers and broadcasts move bytes, so a member may have an array where its peer has a tensor.


def _rows(array: Any, count: int) -> Any:
    """New memory for `count` arrays like this one."""
    shape = (count, *array.shape)
    return array.new_empty(shape) if _is_tensor(array) else np.empty(shape, array.dtype)


def _all_reduce(array: Any, out: Any, op: ReduceName, group: Group) -> None:
    """Write the reduction into `out`, which may be the array."""
    if _is_tensor(array):
        from bps_rdma.torch import transfer

        transfer.all_reduce(array.detach(), _options(group, op), None if out is array else out).wait()
    elif out is array:
        bps_rdma.push_pull_inplace(array, op=op, group=group)
    else:
        out[...] = bps_rdma.push_pull(array, op=op, group=group)


def _reduce_scatter(part: Any, whole: Any, op: ReduceName, group: Group) -> None:
    """Reduce `whole`; this rank's row of it goes to `part`."""
    if _is_tensor(part):
        from bps_rdma.torch import transfer

        transfer.reduce_scatter(part, whole, _options(group, op)).wait()
    else:
        bps_rdma.reduce_scatter(whole, out=part, op=op, group=group)


def _all_gather(whole: Any, part: Any, group: Group) -> None:
    """Fill the rows of `whole` with the parts of all members."""
    if _is_tensor(part):
        from bps_rdma.torch import transfer

        transfer.all_gather(whole, part.detach(), _options(group)).wait()
    else:
        bps_rdma.all_gather(_as_bytes(part), out=_as_bytes(whole), group=group)


def _broadcast(array: Any, root: int, group: Group, name: str | None = None) -> None:
    """Replace the array by that of worker rank `root`."""
    if _is_tensor(array):
        from bps_rdma.torch import transfer

        transfer.broadcast(_as_bytes(array.detach()), root, _options(group, name=name)).wait()
    else:
        bps_rdma.broadcast(_as_bytes(array), name, root=root, group=group)


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _options(group: Group, op: str = "sum", name: str | None = None) -> OperationOptions:
    return OperationOptions(ReduceOp.__members__[op], name, group=group, awaited=True)


def _as_bytes(array: Any) -> Any:
    """The same memory: numpy's arrays and torch's tensors meet under one name."""
    is_tensor = _is_tensor(array)
    if not (array.is_contiguous() if is_tensor else array.flags.c_contiguous):
        raise InvalidTensorError(f"the array of shape {tuple(array.shape)} is not contiguous", "pass a contiguous one")
    return array.reshape(-1).view(sys.modules["torch"].uint8 if is_tensor else np.uint8)


# ---- How the members of a group find each other, through Ray's own store of keys and values

T = TypeVar("T")
_LOOK_S = 0.02
_READ_S = 10.0  # a member that has not read the answer by then is dead


@dataclass(frozen=True)
class _Meeting:
    """The group, the rank in the job of each member, and whether the members joined that job only now."""

    group: bps_rdma.Group
    ranks: list[int]
    joined: bool


def _meet(group: str, size: int, rank: int) -> _Meeting:
    """Find the other members, and join a job with them unless all are in one.

    Raises:
        InvalidArgumentError: some members are in a job and others are not, or in another one.
        DeadlineError: members did not come within BPS_JOIN_TIMEOUT; names them.
    """
    limit = config_with({}).seconds("BPS_JOIN_TIMEOUT")
    mine = {"token": secrets.token_hex(8), "node": ray.get_runtime_context().get_node_id(), **_membership()}
    _put(f"{group}/{rank}", mine)
    try:
        found = _answer(group, size, limit) if rank == 0 else _answered(group, rank, mine, limit)
    finally:
        internal_kv._internal_kv_del(_key(f"{group}/{rank}"))
    try:
        ranks, joined = _ranks(group, rank, found)
        return _Meeting(bps_rdma.new_group(ranks, name=f"ray.{group}"), ranks, joined)
    finally:
        if rank == 0:
            _forget_answer(group, size)


def _forget_answer(group: str, size: int) -> None:
    """Deletes what rank 0 has answered, which holds a secret, once all have read it: then they delete their own."""
    deadline = time.monotonic() + _READ_S
    while any(_get(f"{group}/{rank}") for rank in range(1, size)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    internal_kv._internal_kv_del(_key(f"{group}/all"))


def _membership() -> dict[str, Any]:
    if not bps_rdma.is_initialized():
        return {"job": "", "rank": -1}
    return {"job": job.current().config.text("BPS_JOB_ID"), "rank": bps_rdma.rank()}


def _answer(group: str, size: int, limit: float) -> dict[str, Any]:
    def missing() -> str:
        absent = ", ".join(str(rank) for rank in range(size) if _get(f"{group}/{rank}") is None)
        return f"ranks {absent} of the collective group {group!r} did not come"

    def all_members() -> list[Any] | None:
        entries = [_get(f"{group}/{rank}") for rank in range(size)]
        return None if None in entries else entries

    found = {
        "members": _await(all_members, limit, missing),
        "host": ray.util.get_node_ip_address(),
        "job": f"ray-{secrets.token_hex(8)}",
        "secret": secrets.token_hex(32),
    }
    _put(f"{group}/all", found)
    return found


def _answered(group: str, rank: int, mine: dict[str, Any], limit: float) -> dict[str, Any]:
    def answer() -> dict[str, Any] | None:
        found = _get(f"{group}/all")
        return found if found and mine in found["members"][rank : rank + 1] else None

    return _await(answer, limit, lambda: f"rank 0 of the collective group {group!r} did not answer rank {rank}")


def _ranks(group: str, rank: int, found: dict[str, Any]) -> tuple[list[int], bool]:
    members = found["members"]
    jobs = {member["job"] for member in members}
    if len(jobs) > 1:
        said = ", ".join(f"rank {i} {member['job'] or 'in none'}" for i, member in enumerate(members))
        raise InvalidArgumentError(
            f"members of the collective group {group!r} are in different jobs: {said}",
            "make the largest group first; later ones consist of its members",
        )
    if jobs != {""}:
        return [member["rank"] for member in members], False
    here = [i for i, member in enumerate(members) if member["node"] == members[rank]["node"]]
    with without_identity(os.environ):
        bps_rdma.init(
            rank=rank, world_size=len(members), local_rank=here.index(rank), local_size=len(here),
            root_uri=found["host"], job_id=found["job"], secret=found["secret"],
        )  # fmt: skip
    return list(range(len(members))), True


def _await(look: Callable[[], T | None], limit: float, missing: Callable[[], str]) -> T:
    deadline = time.monotonic() + limit
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{missing()} within {limit:g} s",
                "every member calls init_collective_group(); or raise BPS_JOIN_TIMEOUT",
            )
        time.sleep(_LOOK_S)
    return found


def _key(name: str) -> bytes:
    return f"bps_rdma/collective/{name}".encode()


def _put(name: str, value: dict[str, Any]) -> None:
    internal_kv._internal_kv_put(_key(name), json.dumps(value).encode(), overwrite=True)


def _get(name: str) -> dict[str, Any] | None:
    value = internal_kv._internal_kv_get(_key(name))
    return None if value is None else json.loads(value)

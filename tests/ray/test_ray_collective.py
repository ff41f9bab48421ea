# SPDX-License-Identifier: Apache-2.0
"""The backend of ray.util.collective, on actors that know of bps_rdma only by its name."""

from typing import Any

import harness
import numpy as np
import pytest
import ray
import ray.exceptions
import torch
from ray.experimental import internal_kv
from ray.util import collective

import bps_rdma.ray.collective
from bps_rdma.errors import InvalidArgumentError, PeerLostError

SIZE = 3
bps_rdma.ray.collective.register()  # before the driver names it


class Member:
    """One actor: calls functions of ray.util.collective on arrays of its own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def join(self, size: int, rank: int, group: str) -> None:
        collective.init_collective_group(size, rank, backend="bps", group_name=group)

    def call(self, function: Any, *args: Any) -> Any:
        return function(self.rank, *args)


@pytest.fixture
def members(two_nodes):
    """Three actors on two nodes, in the group "g"."""
    hook = {"worker_process_setup_hook": "bps_rdma.ray.collective.register"}
    kind = ray.remote(num_cpus=0.5, runtime_env=hook, scheduling_strategy="SPREAD")(Member)
    actors = [kind.remote(rank) for rank in range(SIZE)]
    ray.get([actor.join.remote(SIZE, rank, "g") for rank, actor in enumerate(actors)])
    yield actors
    for actor in actors:
        ray.kill(actor)


def on_all(members: list[Any], function: Any, *args: Any) -> list[Any]:
    return ray.get([member.call.remote(function, *args) for member in members])


def everything(rank: int, tensors: bool) -> dict[str, Any]:
    """Each operation once; what this member then has."""
    from ray.util import collective
    from ray.util.collective.types import ReduceOp

    def array(values: Any, dtype: str = "float32") -> Any:
        return torch.tensor(values, dtype=getattr(torch, dtype)) if tensors else np.array(values, dtype)

    own = [rank + 1.0, 10.0 * rank]
    found = {name: array(own) for name in ("sum", "product", "max", "reduced", "broadcast")}
    collective.allreduce(found["sum"], "g")
    collective.allreduce(found["product"], "g", ReduceOp.PRODUCT)
    collective.allreduce(found["max"], "g", ReduceOp.MAX)
    collective.reduce(found["reduced"], 1, "g")
    collective.broadcast(found["broadcast"], 2, "g")
    gathered = [array([[0, 0]], "int16") for _ in range(SIZE)]  # bps_rdma cannot sum it, but move it
    collective.allgather(gathered, array([[rank, 7]], "int16"), "g")
    found["scattered"] = array([0.0])
    collective.reducescatter(found["scattered"], [array([place + 100.0 * rank]) for place in range(SIZE)], "g")
    found["received"] = array([0, 0], "int64")
    to, source = (rank + 1) % SIZE, (rank - 1) % SIZE
    if rank != 0:
        collective.recv(found["received"], source, "g")
    collective.send(array([rank, to], "int64"), to, "g")
    if rank == 0:
        collective.recv(found["received"], source, "g")
    collective.barrier("g")
    return {name: value.tolist() for name, value in found.items()} | {"gathered": [g.tolist() for g in gathered]}


def test_every_operation_and_a_second_group(members):
    """In one test, because actors take long to start."""
    check_everything(on_all(members, everything, False))
    check_everything(on_all(members, everything, True))
    first, *others = on_all(members, in_groups)
    assert first == (0.0, None, False)
    assert others == [(3.0, (place, [2.0, 1.0]), False) for place in (1, 0)]


def check_everything(told: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(told):
        assert found == {
            "sum": [6.0, 30.0],
            "product": [6.0, 0.0],
            "max": [3.0, 20.0],
            "reduced": [6.0, 30.0] if rank == 1 else [rank + 1.0, 10.0 * rank],
            "broadcast": [3.0, 20.0],
            "gathered": [[[member, 7]] for member in range(SIZE)],
            "scattered": [3.0 * rank + 300.0],
            "received": [(rank - 1) % SIZE, rank],
        }


def in_groups(rank: int) -> tuple[Any, ...]:
    """Sums in a group of two of the three, then ends all groups; what came of it, and whether the job goes on."""
    from ray.util import collective

    x = np.float32([rank])
    if rank > 0:  # in the other order
        collective.init_collective_group(2, 2 - rank, backend="bps", group_name="two")
        collective.allreduce(x, "two")
        parts = [np.zeros(1, "float32") for _ in range(2)]
        collective.allgather(parts, np.float32([rank]), "two")
        told = collective.get_rank("two"), [float(part[0]) for part in parts]
        collective.destroy_collective_group("two")
    else:
        told = None
    collective.barrier("g")
    collective.destroy_collective_group("g")
    import bps_rdma

    return float(x[0]), told, bps_rdma.is_initialized()


def waits(rank: int) -> None:
    from ray.util import collective

    collective.allreduce(np.zeros(8, "float32"), "g")


def test_the_death_of_a_member_reaches_the_others(members):
    on_all(members, waits)
    waiting = [member.call.remote(waits) for member in members[:2]]
    ray.kill(members[2])
    for one in waiting:
        with pytest.raises(PeerLostError):
            ray.get(one, timeout=5 * harness.PATIENCE)


@pytest.mark.long
def test_members_of_different_jobs_are_refused(members):
    """The third one has left the job of the others."""
    ray.get(members[2].call.remote(lambda rank: bps_rdma.shutdown()))
    refused = [member.join.remote(SIZE, rank, "again") for rank, member in enumerate(members)]
    for one in refused:
        with pytest.raises(InvalidArgumentError, match=r"are in different jobs: rank 0 ray-.*rank 2 in none"):
            ray.get(one)
    assert internal_kv._internal_kv_list(b"bps_rdma/") == [], "nothing is left, and above all no secret"

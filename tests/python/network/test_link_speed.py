# SPDX-License-Identifier: Apache-2.0
"""Partitions are as large as suits the links between hosts: two namespaces with a network between them."""

import os
from typing import Any

import harness
import numpy as np
from bodies.rails import FIRST, MEMBERS, MIB, enter, shape
from harness import network

KIB = 1 << 10


def partitions(bps: Any, namespaces: list[str], own: dict[str, str]) -> int:
    """How many partitions a sum of 4 MiB has had on this rank, whose settings are those of the job and `own`."""
    rank, here = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    enter(namespaces[rank // here])
    os.environ["LOCAL_RANK"] = str(rank % here)
    if rank == 0:
        os.environ |= own
    bps.init()
    try:
        for number in range(2):
            got = bps.push_pull(np.full(MIB, bps.rank() + number, np.float32), average=False, name="x")
            assert (got == sum(range(bps.size())) + bps.size() * number).all()
        return int(bps.metrics()["total"]["partitions"]) // 2
    finally:
        bps.shutdown()


def run(networks: network.Network, own: dict[str, str] | None = None, workers: int = 2, **env: str) -> list[int]:
    common = {
        "BPS_TRANSPORT": "shm,tcp",
        "BPS_INTERFACE": FIRST,
        "BYTEPS_PUSH_THREAD": "1",
        "BYTEPS_SERVER_ENGINE_THREAD": "1",
        "LOCAL_WORLD_SIZE": str(workers // len(MEMBERS)),
        "MASTER_ADDR": networks.address(MEMBERS[0], FIRST),
        **env,
    }
    namespaces = [networks.namespace(member) for member in MEMBERS]
    return harness.run(partitions, namespaces, own or {}, workers=workers, env=common, init=False)


def test_slow_links_get_small_partitions(networks):
    shape(networks, FIRST, 200)
    assert run(networks) == [4 * MIB // (16 * KIB)] * 2


def test_all_ranks_cut_alike_although_one_link_is_measured_per_host(networks):
    shape(networks, FIRST, 200)
    assert run(networks, workers=4, BPS_HOST_SUM="0") == [4 * MIB // (16 * KIB)] * 4


def test_a_size_that_is_set_counts(networks):
    shape(networks, FIRST, 200)
    assert run(networks, BYTEPS_PARTITION_BYTES=str(256 * KIB)) == [16, 16]


def test_the_smaller_of_two_that_are_set_counts(networks):
    assert run(networks, {"BPS_PARTITION_BYTES": str(128 * KIB)}, BPS_PARTITION_BYTES=str(256 * KIB)) == [32, 32]

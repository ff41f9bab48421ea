# SPDX-License-Identifier: Apache-2.0
"""Which server gets what: BytePS's golden vectors, and balance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import harness
import pytest

from bps_rdma import _core


def test_golden_vectors():
    assert [_core.djb2(key) for key in (0, 1, 65536, 131072)] == [177621, 177622, 210653553582, 6951369072467]
    assert _core.djb2(12345678901234) == 3046910961280192252
    assert (_core.sdbm(0), _core.sdbm(65536)) == (48, 3850799628401345593)
    assert (_core.naive(65536), _core.naive(65537)) == (9973, 19946)
    assert _core.make_key(3, 5) == (3 << 16) + 5


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ids", [range(1000), [(i * 2654435761) % (1 << 30) for i in range(1, 1001)]])
def test_raw_spreads_single_partition_tensors(servers, ids):
    load = Counter(_core.server_of("raw", servers, 4, tensor, 0) for tensor in ids)
    assert max(load.values()) <= 1.5 * 1000 / servers


@pytest.mark.parametrize("hash_", ["raw", "djb2", "naive", "built_in", "sdbm", "mixed"])
def test_every_hash_stays_in_range(hash_):
    for servers in (1, 2, 3, 8):
        for partition in range(200):
            assert 0 <= _core.server_of(hash_, servers, 2, 77, partition) < servers


def placed(bps: Any, count: int) -> list[int]:
    sizes = {f"t{i}": ((i * 7919) % 200_000 + 1,) for i in range(count)}
    bps.declare_many({name: (shape, "float32") for name, shape in sizes.items()})
    from bps_rdma import job

    tensors = list(job.current().tensors.values())
    return [sum(column) for column in zip(*(tensor.server_bytes for tensor in tensors), strict=True)]


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 8])
def test_balanced_is_even_in_bytes(servers):
    env = {"BYTEPS_KEY_HASH_FN": "balanced", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    loads = harness.run(placed, 300, workers=2, servers=servers, env=env)
    assert loads[0] == loads[1]  # all ranks agree
    assert max(loads[0]) <= 1.1 * sum(loads[0]) / servers


def placed_alike(bps: Any, count: int, elements: int) -> list[int]:
    bps.declare_many({f"t{i}": ((elements,), "float32") for i in range(count)})
    from bps_rdma import job

    return [sum(column) for column in zip(*(t.server_bytes for t in job.current().tensors.values()), strict=True)]


def test_balanced_is_even_for_tensors_of_one_partition():
    env = {"BYTEPS_KEY_HASH_FN": "balanced", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    loads = harness.run(placed_alike, 100, 128 << 10, workers=2, servers=4, env=env)
    assert loads[0] == loads[1]  # all ranks agree
    assert max(loads[0]) <= 1.05 * sum(loads[0]) / 4

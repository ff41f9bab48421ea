# SPDX-License-Identifier: Apache-2.0
"""How even `balanced` is in bytes; tests/cpp/tensor/key_map_test.cc has the other hashes."""

from __future__ import annotations

from typing import Any

import harness
import pytest

BALANCED = {"BYTEPS_KEY_HASH_FN": "balanced", "BYTEPS_SERVER_ENGINE_THREAD": "1"}


def bytes_of_servers(bps: Any, elements: list[int]) -> list[int]:
    """How many bytes each server gets of tensors of these sizes."""
    bps.declare_many({f"t{i}": ((count,), "float32") for i, count in enumerate(elements)})
    from bps_rdma import job

    return [sum(column) for column in zip(*(t.server_bytes for t in job.current().tensors.values()), strict=True)]


MANY_SIZES = [(i * 7919) % 200_000 + 1 for i in range(300)]
ONE_PARTITION_EACH = [128 << 10] * 100


@pytest.mark.parametrize(
    ("servers", "elements", "most"),
    [*((servers, MANY_SIZES, 1.1) for servers in (1, 2, 3, 4, 8)), (4, ONE_PARTITION_EACH, 1.05)],
)
def test_balanced_is_even_in_bytes(servers: int, elements: list[int], most: float) -> None:
    loads = harness.run(bytes_of_servers, elements, workers=2, servers=servers, env=BALANCED)
    assert loads[0] == loads[1]  # all ranks agree
    assert max(loads[0]) <= most * sum(loads[0]) / servers

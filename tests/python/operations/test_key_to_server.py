# SPDX-License-Identifier: Apache-2.0
"""How even `balanced` is in bytes; tests/cpp/tensor/key_map_test.cc has the other hashes."""

from typing import Any

import harness
import pytest


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

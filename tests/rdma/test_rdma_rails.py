# SPDX-License-Identifier: Apache-2.0
"""Several RDMA devices of each process: rails."""

from typing import Any

import fabric
import harness
import numpy as np
import pytest
from bodies.sums import interleaved_rounds
from levels import cases

MIB = 1 << 20
ONE_LOOP = {"BPS_TRANSPORT": "rdma", "BYTEPS_PUSH_THREAD": "1", "BYTEPS_SERVER_ENGINE_THREAD": "1"}


def sums(bps: Any, rounds: int) -> None:
    rank = bps.rank()
    for round_ in range(rounds):
        got = bps.push_pull(np.full(MIB, rank + round_, np.float32), average=False, name="x")
        assert (got == 2 * round_ + 1).all()


ROUNDS = 8
ARRAY = 4 * MIB // 4096  # packets: what a rail that is used has to carry, of all that the ranks send


def sent_by(devices: list[str], **env: str) -> list[int]:
    """Packets that each device has sent while two ranks with one loop each summed 8 arrays of 4 MiB."""
    before = [fabric.hardware_counters(device)["sent_pkts"] for device in devices]
    harness.run(sums, ROUNDS, workers=2, env=ONE_LOOP | env, timeout=200)
    return [
        fabric.hardware_counters(device)["sent_pkts"] - count for device, count in zip(devices, before, strict=True)
    ]


@pytest.mark.long
@pytest.mark.vm
def test_one_loop_uses_every_rail_that_is_named(spare_device):
    first, second = sent_by([fabric.HCA, spare_device.hca], BPS_RDMA_HCA=f"={fabric.HCA},{spare_device.hca}")
    assert first + second > ROUNDS * ARRAY
    assert min(first, second) > ARRAY, "a rail is not used"


@pytest.mark.vm
def test_all_rails_are_used_by_default(spare_device):
    first, second = sent_by([fabric.HCA, spare_device.hca])
    assert min(first, second) > ARRAY, "a rail is not used"


@pytest.mark.long
@pytest.mark.vm
def test_a_rail_that_is_not_named_is_not_used(spare_device):
    first, second = sent_by([fabric.HCA, spare_device.hca], BPS_RDMA_HCA=f"^={spare_device.hca}")
    assert first > ROUNDS * ARRAY
    assert second == 0


@pytest.mark.vm
@pytest.mark.parametrize("servers", cases([None], [2]))
def test_sums_of_all_dtypes_over_two_rails(spare_device, servers):
    env = {"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": f"={fabric.HCA},{spare_device.hca}"}
    assert harness.run(interleaved_rounds, "empty", 40, workers=2, servers=servers, env=env) == [0, 0]

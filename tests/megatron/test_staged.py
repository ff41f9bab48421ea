# SPDX-License-Identifier: Apache-2.0
"""Megatron's buffers on a device: staged through pinned memory, training is bit for bit what it is on stock.

The device is simulated: its streams are slow threads, so whatever is not ordered by events comes too early or too late.
"""

from typing import Any

import harness
import pytest
from gpt import Setup
from parity import BOTH_OVERLAPS, TWO_RANKS, check, stock_and_ours

CHUNKS = {"BPS_GPU_CHUNK_BYTES": "16384", "BPS_GPU_CHUNKS": "3"}


def on_a_device(bps: Any, setup: Setup, tensors: bool = False) -> dict[str, Any]:
    import simulated

    device = simulated.install(delay=0.0002, immediate=True)
    found = stock_and_ours(bps, setup, tensors)
    bps.shutdown()
    device.await_end()
    return {**found, "device_copies": device.copies}


@pytest.mark.parametrize(
    "name",
    [
        "distributed optimizer, both overlaps",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("plain", "overlap, average, NaN check", "bf16, overlap")
        ),
    ],
)
def test_two_ranks(name):
    setup = TWO_RANKS[name]
    found = harness.run(on_a_device, setup, workers=2, init=False, env=CHUNKS)
    check(found, setup)
    for one in found:
        assert one["device_copies"] >= 2 * sum(one["counts"].values()), "tensors were not staged"
        assert one["copied_bytes"] == 0, "chunks are copied by the device alone"


@pytest.mark.parametrize(
    "name",
    [
        "overlap, average, NaN check",
        "distributed optimizer, both overlaps",
        pytest.param("plain", marks=pytest.mark.long),
    ],
)
def test_what_the_gpus_of_a_host_do_alone(name):
    """With BPS_GPU_HOST_SUM=1 gradients and parameters do not leave the GPUs of the only host."""
    setup = TWO_RANKS[name]
    found = harness.run(on_a_device, setup, workers=2, init=False, env=CHUNKS | {"BPS_GPU_HOST_SUM": "1"})
    check(found, setup)
    for one in found:
        assert sum(one["counts"].values()) > 0
        assert one["device_copies"] == 0


@pytest.mark.long
def test_four_ranks():
    setup = Setup(steps=6, **BOTH_OVERLAPS)
    check(harness.run(on_a_device, setup, workers=4, init=False, env=CHUNKS), setup)


@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.long), True], ids=["all-reduce", "sequence parallel"]
)
def test_tensor_parallel_collectives(sequence):
    setup = Setup(tp=2, sp=sequence, steps=4)
    found = harness.run(on_a_device, setup, True, workers=4, init=False, env=CHUNKS)
    check(found, setup)
    for one in found:
        assert one["device_copies"] > 100 * one["counts"]["all_reduce"] / setup.steps

# SPDX-License-Identifier: Apache-2.0
"""`bps tune` on a machine with a GPU: the model of its copies, and copies of the fake driver."""

import ctypes
import json
import sys
from collections.abc import Iterator
from typing import Any

import gpu_arrays
import harness
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bps_rdma.errors import TransportError
from bps_rdma.tools.bench.pattern import WrongResultError
from bps_rdma.tools.tune import copies
from bps_rdma.tools.tune.command import settings_of, settings_of_route
from bps_rdma.tools.tune.copies import Copies, best_chunk, least_partition, measure_copies, partition_for
from bps_rdma.tools.tune.measure import Found, copies_of
from bps_rdma.tools.tune.model import Costs

COMMAND = [sys.executable, "-P", "-m", "bps_rdma", "tune", "--gradients", "128K", "--seconds", "1"]
NETWORK = Costs(50e-6, 10e9, 0.0)


def of(overhead_s: float, bytes_per_s: float, up: Costs | None = None) -> Copies:
    down = Costs(overhead_s, bytes_per_s, 0.0)
    return Copies(0, [], down, up or down)


# ---- The model


def test_a_tensor_of_one_chunk_goes_through_one_stage_after_the_other() -> None:
    stages = [Costs(1.0, 1.0, 0.0), Costs(2.0, 1.0, 0.0)]
    assert copies.pipeline_seconds(4, 8, stages) == 5 + 6
    assert copies.pipeline_seconds(8, 4, stages) == 5 + 6 + 6, "the second chunk waits for the slower stage"
    assert copies.pipeline_seconds(9, 4, stages) == 5 + 6 + 2 * 6


@given(
    st.floats(1e-6, 1e-3), st.floats(1e9, 1e11), st.floats(1e-5, 1e-3), st.floats(1e8, 5e10), st.integers(1, 1 << 30)
)
def test_no_other_chunk_is_better(overhead: float, rate: float, latency: float, link: float, nbytes: int) -> None:
    gpu, network = of(overhead, rate), Costs(latency, link, 0.0)
    chosen = best_chunk(gpu, network, nbytes)
    stages = (gpu.down, network, gpu.up)
    best = copies.pipeline_seconds(nbytes, chosen or 4 << 20, stages)
    assert all(best <= 1.03 * copies.pipeline_seconds(nbytes, 1 << power, stages) for power in range(18, 27))


def test_a_slow_start_wants_large_chunks_and_a_fast_one_small_ones() -> None:
    assert best_chunk(of(5e-6, 25e9), Costs(10e-3, 10e9, 0.0), 64 << 20) == 64 << 20
    small = best_chunk(of(5e-6, 25e9), Costs(5e-6, 10e9, 0.0), 4 << 20)
    assert small is not None
    assert small < 4 << 20


def test_copies_that_are_faster_than_the_link_have_small_partitions() -> None:
    """At 5 us and 20 GB/s a copy of n bytes takes as long as on a link of 10 GB/s where n is 100 kB."""
    assert least_partition(of(5e-6, 20e9), NETWORK) == 128 << 10
    assert least_partition(of(1e-6, 20e9), NETWORK) == 64 << 10
    assert least_partition(of(5e-6, 20e9, up=Costs(20e-6, 20e9, 0.0)), NETWORK) == 512 << 10, "the slower direction"


def test_copies_that_are_no_faster_lose_a_tenth() -> None:
    assert least_partition(of(10e-6, 10e9), NETWORK) == 1 << 20  # 9 * 10 us * 10 GB/s is 900 kB
    assert least_partition(of(1.0, 10e9), NETWORK) == 16 << 20, "there is an end"


def test_partitions_are_those_of_the_host_unless_copies_want_larger_ones() -> None:
    fast, slow = of(1e-6, 20e9), of(10e-6, 10e9)
    assert partition_for(fast, NETWORK, None) is None
    assert partition_for(fast, NETWORK, 1 << 17) == 1 << 17
    assert partition_for(slow, NETWORK, None) == 1 << 20
    assert partition_for(slow, NETWORK, 4 << 20) == 4 << 20


def test_settings_of_both_ways() -> None:
    found = Found(2, ["rdma"], 1 << 30, NETWORK, [], partition=1 << 17, bucket=4 << 20)
    assert settings_of(found) == {"BPS_PARTITION_BYTES": "131072"}
    found.copies = of(10e-6, 10e9)
    assert settings_of_route(found) == {"BPS_DEVICE_ROUTE": "1", "BPS_PARTITION_BYTES": "1048576"}
    found.costs = Costs(10e-3, 10e9, 0.0)
    found.bucket = 64 << 20
    assert settings_of(found)["BPS_GPU_CHUNK_BYTES"] == str(64 << 20)


# ---- Copies


@pytest.fixture
def fake(monkeypatch) -> Iterator[Any]:
    monkeypatch.setenv("BPS_CUDA_LIB", gpu_arrays.driver())
    library = ctypes.CDLL(gpu_arrays.driver())
    library.fake_refuse.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    yield library
    library.fake_hang(0)


def test_the_copies_of_a_gpu_are_measured(fake) -> None:
    found = measure_copies(gpu_arrays.driver(), 5, 0.05)
    assert found is not None
    assert found.gpu == 0, "ranks share it"
    assert [point.nbytes for point in found.points] == [1 << power for power in (16, 18, 20, 22, 24)]
    assert all(point.down_s > 0 and point.up_s > 0 for point in found.points)
    assert found.down.bytes_per_s > 0
    assert fake.fake_busy() == 0


def test_there_may_be_no_gpu(monkeypatch) -> None:
    assert measure_copies("libno-such-driver.so", 0, 0.05) is None
    monkeypatch.setenv("FAKE_CUDA_GPUS", "0")
    assert measure_copies(gpu_arrays.driver(), 0, 0.05) is None


def test_a_gpu_that_refuses_or_hangs_is_an_error(fake, monkeypatch) -> None:
    fake.fake_refuse(b"cuMemcpyHtoDAsync_v2", 999, 0)
    with pytest.raises(TransportError, match="refused a copy"):
        measure_copies(gpu_arrays.driver(), 0, 0.05)
    fake.fake_refuse(b"cuMemcpyHtoDAsync_v2", 999, 0)
    assert copies_of(gpu_arrays.driver(), 0) is None, "the command goes on without it"
    fake.fake_hang(1)
    monkeypatch.setattr(copies, "_PATIENCE_S", 0.2)
    with pytest.raises(TransportError, match="has not copied"):
        measure_copies(gpu_arrays.driver(), 0, 0.05)


def test_bytes_that_come_back_otherwise_are_an_error() -> None:
    host = (ctypes.c_uint8 * copies._SIZES[-1])()
    at = ctypes.c_void_p(ctypes.addressof(host))
    with pytest.raises(WrongResultError):
        copies._check(at, lambda _size, _times: None, lambda _size, _times: None)


def test_the_command_shows_copies_and_what_follows() -> None:
    env = harness.clean_env() | {"BPS_CUDA_LIB": gpu_arrays.driver()}
    done = harness.run_command([*COMMAND, "--json"], env=env, within=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["copies"]["points"]) == 5
    assert found["settings_of_route"]["BPS_DEVICE_ROUTE"] == "1"
    done = harness.run_command(COMMAND, env=env, within=300)
    assert "copies of GPU 0, from and to pinned memory" in done.stdout
    assert "# with the core's own route: BPS_DEVICE_ROUTE=1" in done.stdout

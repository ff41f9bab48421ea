# SPDX-License-Identifier: Apache-2.0
"""Sizes at every border: elements, partitions, 32 bits, many tensors; and every way to spread partitions over loops."""

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.sizes import PARTITION, check, loops_and_hashes, sizes_around_partitions

# Cuts tensors exactly at that size.
SMALL_PARTITIONS = harness.cut_at(PARTITION)


@pytest.mark.parametrize(
    ("workers", "servers", "env"),
    [
        (1, None, {}),
        (2, None, {"BPS_TRANSPORT": "shm"}),
        (2, None, {"BPS_TRANSPORT": "tcp"}),
        (2, None, {"BPS_TRANSPORT": "shm", "BPS_SHM_CMA": "0"}),
        (3, 2, {"BPS_TRANSPORT": "tcp"}),
        (2, 3, {"BPS_TRANSPORT": "shm"}),
        # No element fits into a partition of these sizes evenly.
        (2, None, {"BYTEPS_PARTITION_BYTES": "4099", "BPS_MIN_PARTITION_BYTES": "1000"}),
        # Larger than a small landing slot and smaller than a page of them.
        (2, None, {"BPS_TRANSPORT": "tcp", "BYTEPS_PARTITION_BYTES": "8192", "BPS_MIN_PARTITION_BYTES": "8192"}),
    ],
)
def test_sizes_around_partitions(workers, servers, env):
    harness.run(sizes_around_partitions, workers=workers, servers=servers, env=SMALL_PARTITIONS | env)


@harness.on_ranks("transport", workers=2)
def test_default_partition_size(bps: Any) -> None:
    limit = 524_288
    for count in (limit - 1, limit, limit + 1, 2 * limit + 7):
        check(bps, count, "uint8", str(count))
    check(bps, 5_000_001, "int32", "integers")


@pytest.mark.parametrize(("workers", "transport"), [(2, "shm"), (2, "tcp"), (1, "auto")])
@harness.on_ranks("workers", "transport", env={"BYTEPS_PARTITION_BYTES": "64", "BPS_MIN_PARTITION_BYTES": "64"})
def test_more_than_65536_partitions(bps: Any) -> None:
    check(bps, 70_000 * 8 + 3, "float64", "many")
    assert bps.metrics()["total"]["partitions"] == 2 * 70_001


@harness.on_ranks("transport", workers=2, env={"BYTEPS_PARTITION_BYTES": "16", "BPS_MIN_PARTITION_BYTES": "16"})
def test_a_late_rank_finds_many_open_partitions(bps: Any) -> None:
    """Rank 1 comes late: the server has all partitions of rank 0 open at once."""
    if bps.rank() == 0:
        handle = bps.push_pull_async(np.full(400_000, 1, np.uint8), average=False, name="many")
        bps.push_pull(np.zeros(1), name="go")
        assert np.all(bps.synchronize(handle) == 3)
    else:
        bps.push_pull(np.zeros(1), name="go")
        assert np.all(bps.push_pull(np.full(400_000, 2, np.uint8), average=False, name="many") == 3)


def _available_gib() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20


HUGE = 2**32 + 12345


def beyond_4_gib(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    huge = np.empty(HUGE, np.uint8)
    huge[:] = rank + 1
    # Places whose low 32 bits are equal hold different values.
    special = [0, 12344, 2**31, 2**32 - 1, 2**32, 2**32 + 12344]
    for i, place in enumerate(special):
        huge[place] = 10 * (i + 1) + rank
    bps.push_pull_inplace(huge, average=False, name="huge")
    for i, place in enumerate(special):
        assert huge[place] == sum(10 * (i + 1) + r for r in range(size)), f"element {place}"
        huge[place] = size * (size + 1) // 2
    step = 1 << 28
    for start in range(0, HUGE, step):  # in pieces: a mask of all would take as much memory again
        part = huge[start : start + step]
        assert part.min() == part.max() == size * (size + 1) // 2


@pytest.mark.long
@pytest.mark.parametrize(("workers", "transport"), [pytest.param(1, "auto", marks=pytest.mark.long), (2, "shm")])
def test_a_tensor_beyond_4_gib(workers, transport):
    if _available_gib() < 2 * 4.2 + 1.5:
        workers = 1
    needed = workers * 4.2 + 1.5
    if _available_gib() < needed:
        pytest.skip(f"needs {needed:.1f} GiB of memory, {_available_gib():.1f} are available")
    harness.run(beyond_4_gib, workers=workers, env={"BPS_TRANSPORT": transport}, timeout=250)


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (2, "tcp")])
@harness.on_ranks("servers", "transport", workers=2)
def test_ten_thousand_tensors(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    names = [f"layer.{i}.weight" for i in range(10_000)]
    bps.declare_many({name: ((i % 50 + 1,), "float32") for i, name in enumerate(names)})
    arrays = [np.full(i % 50 + 1, rank + i, np.float32) for i in range(10_000)]
    handles = [bps.push_pull_async_inplace(a, False, name) for name, a in zip(names, arrays, strict=True)]
    for i, result in enumerate(bps.wait(handles)):
        assert np.all(result == sum(r + i for r in range(size))), names[i]


LOOPS = {"BYTEPS_PUSH_THREAD": "3", "BYTEPS_SERVER_ENGINE_THREAD": "2"}


@pytest.mark.parametrize(
    ("servers", "transport", "env"),
    [
        (None, "shm", LOOPS),
        (None, "tcp", LOOPS),
        (2, "shm", LOOPS),
        (2, "tcp", LOOPS),
        (1, "tcp", {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "4"}),
        (2, "tcp", {"BYTEPS_PUSH_THREAD": "4", "BYTEPS_SERVER_ENGINE_THREAD": "1"}),
    ],
)
def test_several_push_loops_and_engine_threads(servers, transport, env):
    env = SMALL_PARTITIONS | env | {"BPS_TRANSPORT": transport}
    harness.run(loops_and_hashes, workers=2, servers=servers, env=env)


@pytest.mark.parametrize("hash_name", ["raw", "djb2", "naive", "built_in", "sdbm", "mixed", "balanced"])
@pytest.mark.parametrize("servers", [None, 3])
def test_every_key_hash(hash_name, servers):
    env = SMALL_PARTITIONS | {"BYTEPS_KEY_HASH_FN": hash_name}
    harness.run(loops_and_hashes, workers=2, servers=servers, env=env)

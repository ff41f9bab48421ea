# SPDX-License-Identifier: Apache-2.0
"""Nothing grows: memory, descriptors, threads and mappings are after many operations what they were after a few."""

import contextlib
import gc
import os
from collections import deque
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from reference.values import pushed, summed

from bps_rdma import _core

LONG = bool(os.environ.get("BPS_TEST_ALL"))
OPERATIONS = 100_000 if LONG else 15_000  # twice
NAMES = 1000  # of the arrays in empties()
MORE_KIB = 4096 if LONG else 768  # resident: 42 bytes for each of the operations, or 52

# The allocators of C and of Python map memory in pieces, which they split and join: twelve more have been seen. What is
# leaked by each operation, array or init() would be thirty at least, by the smallest count of them below.
FEW_MAPPINGS = 24


def footprint() -> dict[str, int]:
    """What this process holds: resident KiB, descriptors, threads, mappings."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident": int(status["VmRSS"].split()[0]),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(status["Threads"]),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before}


def settled(before: dict[str, int], limits: dict[str, int]) -> dict[str, int]:
    """Growth since `before`, given a moment: a peer withdraws its memory when it gets round to it."""
    grown: dict[str, int] = {}

    def is_small() -> bool:
        _core.release_orphans(all=False)  # what the next operation would do; a handle that was dropped may end only now
        grown.update(growth(before, footprint()))
        return all(grown[name] <= limit for name, limit in limits.items())

    with contextlib.suppress(harness.WaitedInVainError):  # which the test looks at
        harness.eventually(is_small)
    return grown


def look_at(ranks: list[dict[str, int]], more_kib: int = 4096) -> None:
    for grown in ranks:
        assert grown["descriptors"] <= 0
        assert grown["threads"] <= 0
        assert grown["mappings"] <= FEW_MAPPINGS
        assert grown["resident"] <= more_kib, f"{grown['resident']} KiB more"


def many_operations(bps: Any, operations: int) -> dict[str, int]:
    rank, size = bps.rank(), bps.size()
    names = [f"n{i}" for i in range(50)]
    expected = [summed(100, "int64", range(size), 0, i) for i in range(50)]
    pending: deque[tuple[int, Any]] = deque()

    def run(count: int) -> None:
        for i in range(count):
            index = i % 50
            if len(pending) == 200:
                at, oldest = pending.popleft()
                assert np.array_equal(bps.synchronize(oldest), expected[at])
            pending.append((index, bps.push_pull_async(pushed(100, "int64", rank, 0, index), False, names[index])))
            if i % 997 == 0:
                bps.barrier()
        while pending:
            at, oldest = pending.popleft()
            assert np.array_equal(bps.synchronize(oldest), expected[at])

    def grown() -> dict[str, int]:
        before = footprint()
        run(operations)
        bps.barrier()
        found = settled(before, {"resident": MORE_KIB, "descriptors": 0, "threads": 0, "mappings": FEW_MAPPINGS})
        bps.barrier()
        return found

    run(10_000)
    bps.barrier()
    first, second = grown(), grown()
    # A leak of memory grows each time. Python takes another MiB for small objects now and then, at once.
    kept = {name: max(first[name], second[name]) for name in ("descriptors", "threads", "mappings")}
    return kept | {"resident": min(first["resident"], second["resident"])}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("servers", "transport"), [(None, "shm"), pytest.param(None, "tcp", marks=pytest.mark.long), (1, "tcp")]
)
def test_many_operations_leave_nothing(servers, transport):
    options = {"workers": 2, "servers": servers, "env": {"BPS_TRANSPORT": transport}}
    look_at(harness.run(many_operations, OPERATIONS, timeout=400, **options), MORE_KIB)


def cycles(bps: Any, count: int, alone: bool) -> dict[str, int]:
    def cycle() -> None:
        bps.init()
        assert np.all(bps.push_pull(np.ones(1000), average=False, name="x") == bps.size())
        shared = bps.empty(1000, "float64")
        bps.push_pull_inplace(shared, name="y")
        bps.barrier()
        bps.shutdown()

    for _ in range(count // 10):
        cycle()
    before = footprint()
    for _ in range(count):
        cycle()
    return settled(before, {"descriptors": 0, "threads": 0})  # the kernel counts a thread for a moment after its end


@pytest.mark.parametrize(("workers", "count"), [(1, 200), (2, 30)])
def test_init_and_shutdown_in_one_process(workers, count):
    look_at(harness.run(cycles, count, workers == 1, workers=workers, init=False, timeout=240))


def empties(bps: Any, count: int) -> dict[str, int]:
    rank, size = bps.rank(), bps.size()

    def run(rounds: range) -> None:
        for round_ in rounds:
            elements = 1000 + 5 * (round_ * 37 % NAMES)
            array = bps.empty(elements, "int32")
            assert not array.any(), "empty() gives zeroes"
            array[...] = pushed(elements, "int32", rank, round_)
            if round_ % 3 == 0:
                bps.push_pull_async_inplace(array, False, f"dropped {elements}")
            else:
                bps.push_pull_inplace(array, False, f"n {elements}")
                assert np.array_equal(array, summed(elements, "int32", range(size), round_)), round_
            plain = np.full(elements, rank, np.int32)  # perhaps where a shared one lay before
            bps.push_pull_inplace(plain, False, f"n {elements}")
            assert np.all(plain == sum(range(size))), round_
        del array
        bps.push_pull(np.ones(2), name="last")
        bps.barrier()

    run(range(NAMES))  # every name once, so that the table of names is as long before as after
    before = footprint()
    run(range(NAMES, NAMES + count))
    grown = settled(before, {"resident": 4096, "descriptors": 0, "mappings": FEW_MAPPINGS})
    bps.barrier()
    return grown


@pytest.mark.long
def test_2_000_shared_arrays_made_and_freed(transport):
    look_at(harness.run(empties, 2000, workers=2, env={"BPS_TRANSPORT": transport}, timeout=240))

# SPDX-License-Identifier: Apache-2.0
"""push_pull and its companions over real verbs: the bodies of tests/python, with transport rdma."""

import mmap
from typing import Any

import harness
import numpy as np
import pytest
from bodies.call_order import far_ahead, fast_and_slow, last_slot_taken_before, random_orders
from bodies.collectives import broadcasts, mixed_kinds, pushes_and_pulls, scatter_and_gather
from bodies.groups import disjoint_groups, overlapping_groups
from bodies.messages import exchanges, from_any, many_under_way, uneven
from bodies.sizes import loops_and_hashes, sizes_around_partitions
from bodies.sums import averages, in_place_and_not, interleaved_rounds
from levels import cases
from reference.values import pushed, summed

RDMA = harness.over("rdma")
# (workers, servers): joint, then dedicated.
TOPOLOGIES = [(1, None), (2, None), (3, None), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]


def with_memory(
    landing: list[tuple[int, int | None, str]], topologies: list[tuple[int, int | None]]
) -> pytest.MarkDecorator:
    """Those at a landing, and each of the topologies with each kind of memory in `ci/test --all`."""
    every = [(*topology, memory) for topology in topologies for memory in ("plain", "empty")]
    rest = [case for case in every if case not in landing]
    return pytest.mark.parametrize(("workers", "servers", "memory"), cases(landing, rest))


@with_memory([(2, None, "empty"), (2, 1, "plain"), (3, 2, "empty")], TOPOLOGIES)
def test_sums_of_all_dtypes(workers, servers, memory):
    wrong = harness.run(interleaved_rounds, memory, 60, workers=workers, servers=servers, env=RDMA)
    assert wrong == [0] * workers


@pytest.mark.parametrize("workers", cases([3], [2]))
def test_averages(workers):
    assert harness.run(averages, "rdma", workers=workers, env=RDMA) == [[]] * workers


@pytest.mark.parametrize("servers", cases([1], [None]))
def test_in_place_writes_into_the_array_and_nowhere_else(servers):
    harness.run(in_place_and_not, workers=2, servers=servers, env=RDMA)


@pytest.mark.parametrize(
    ("workers", "servers", "partition"), cases([(3, 2, 4096), (2, None, 4099)], [(2, None, 4096), (2, 1, 8192)])
)
def test_sizes_around_partitions(workers, servers, partition):
    harness.run(sizes_around_partitions, workers=workers, servers=servers, env=RDMA | harness.cut_at(partition))


@pytest.mark.parametrize("body", cases([many_under_way, uneven], [exchanges, from_any]))
def test_messages(body):
    harness.run(body, workers=3, env=RDMA | harness.cut_at(8192))


def large(bps: Any, counts: list[int]) -> None:
    """In place, in pieces that repeat: whole arrays of intermediate results cost more here than what is tested."""
    rank, size = bps.rank(), bps.size()
    period = 65_521  # prime, so that no partition looks like another one
    mine, expected = pushed(period, "float32", rank), summed(period, "float32", range(size))
    for count in counts:
        array = np.empty(count + 1, np.float32)
        for begin in range(0, count, period):
            array[begin : min(begin + period, count)] = mine[: count - begin]
        array[count] = -7  # which nobody may touch
        bps.push_pull_inplace(array[:count], average=False, name=f"large {count}")
        for begin in range(0, count, period):
            part = array[begin : min(begin + period, count)]
            assert np.array_equal(part, expected[: len(part)]), f"wrong after element {begin} of {count}"
        assert array[count] == -7


def test_default_partition_size():
    partition = 524_288 // 4
    counts = [partition - 1, partition, partition + 1, 2 * partition + 7]
    harness.run(large, counts, workers=2, env=RDMA)


def arrays_that_come_and_go(bps: Any, rounds: int) -> int:
    """Large enough for an allocation to be a mapping of its own, whose addresses the next one gets."""
    rank, size = bps.rank(), bps.size()
    seen: set[int] = set()
    again = 0
    for round_ in range(rounds):
        array = np.full(500_000 + rank, rank + round_, np.float32)
        address = array.__array_interface__["data"][0]
        again += address in seen
        seen.add(address)
        got = bps.push_pull(array[:500_000], average=False, name="x")
        bps.push_pull_inplace(array[:500_000], average=False, name="y")
        expected = size * round_ + size * (size - 1) / 2
        assert (got == expected).all(), f"round {round_}, out of place"
        assert (array[:500_000] == expected).all(), f"round {round_}, in place"
        del array, got
    return again


@pytest.mark.parametrize("servers", cases([1], [None]))
def test_memory_at_the_address_of_what_was_freed(servers):
    again = harness.run(arrays_that_come_and_go, 10, workers=2, servers=servers, env=RDMA)
    assert min(again) > 0, "no address came twice, so nothing was shown"


@pytest.mark.parametrize(("servers", "partition"), cases([(1, 32 << 20)], [(None, 4_096_000), (1, 4_096_000)]))
def test_more_than_64_mib(servers, partition):
    # The last: partitions beyond rxe's largest message of 8 MiB.
    count = (72 << 20) // 4 + 1
    harness.run(large, [count], workers=2, servers=servers, env=RDMA | harness.cut_at(partition), timeout=250)


SMALLEST_WINDOW = RDMA | {"BPS_SERVER_WINDOW": "1"}


@pytest.mark.parametrize(
    ("workers", "servers", "env"),
    cases(
        [(2, None, {}), (3, 1, {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"})],
        [(3, 1, {}), (3, 2, {}), (2, 1, {"BYTEPS_SCHEDULING_CREDIT": "1"})],
    ),
)
def test_random_orders_never_block(workers, servers, env):
    env = SMALLEST_WINDOW | harness.cut_at(12 << 10) | env
    assert harness.run(random_orders, 25, workers=workers, servers=servers, env=env) == [0] * workers


def test_a_worker_without_slots_gets_one_when_only_it_is_missing():
    env = RDMA | {"BPS_SERVER_WINDOW": "2", "BYTEPS_SERVER_ENGINE_THREAD": "1", "BPS_TIMEOUT": "20"}
    harness.run(last_slot_taken_before, workers=3, servers=1, env=env)


@pytest.mark.parametrize(("servers", "ahead"), cases([(None, 1), (2, 16)], [(None, 16), (2, 1)]))
def test_rounds_of_a_fast_and_a_slow_rank_never_mix(servers, ahead):
    assert harness.run(fast_and_slow, ahead, 300, workers=2, servers=servers, env=RDMA) == [0, 0]


@pytest.mark.parametrize("servers", cases([None], [1]))
def test_a_rank_may_be_hundreds_of_rounds_ahead(servers):
    harness.run(far_ahead, workers=2, servers=servers, env=RDMA)


@pytest.mark.parametrize("servers", cases([None], [2]))
def test_groups(servers):
    harness.run(disjoint_groups, 20, workers=4, servers=servers, env=RDMA)
    harness.run(overlapping_groups, 20, workers=3, servers=servers, env=RDMA)


@with_memory([(3, 2, "empty")], [(3, None), (2, 1), (3, 2)])
def test_reduce_scatter_and_all_gather(workers, servers, memory):
    harness.run(scatter_and_gather, memory, workers=workers, servers=servers, env=RDMA | harness.cut_at(8192))


@pytest.mark.parametrize(
    ("body", "servers"),
    cases([(broadcasts, None), (pushes_and_pulls, 2)], [(broadcasts, 2), (pushes_and_pulls, None)]),
)
def test_other_collectives(body, servers):
    harness.run(body, workers=3, servers=servers, env=RDMA | harness.cut_at(8192))


def test_operations_of_all_kinds_at_once():
    harness.run(mixed_kinds, workers=3, env=RDMA)


@pytest.mark.parametrize(("push", "engine"), cases([("3", "2")], [("1", "4")]))
def test_several_push_loops_and_engine_threads(push, engine):
    env = RDMA | harness.cut_at(4096) | {"BYTEPS_PUSH_THREAD": push, "BYTEPS_SERVER_ENGINE_THREAD": engine}
    harness.run(loops_and_hashes, workers=2, servers=2, env=env)


def memory_that_moves(bps: Any, forgets: bool) -> list[bool]:
    """The pages under an array are given back and got anew, at the same address; as Megatron's buffers may be."""
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.float32)
    right = []
    for step in range(3):
        array[:] = bps.rank() + step
        bps.push_pull_inplace(array, False, "moving")
        right.append(bool((array == 1 + 2 * step).all()))
        memory.madvise(mmap.MADV_DONTNEED)
        if forgets:
            bps.forget(array)
    return right


@pytest.mark.parametrize("forgets", [True, False])
def test_memory_that_moves_and_is_trusted(forgets):
    """What the program does not tell, the device does not know."""
    right = [True, forgets, forgets]
    assert harness.run(memory_that_moves, forgets, workers=2, env=RDMA | {"BPS_RDMA_MEMORY": "trusted"}) == [right] * 2


def in_place_by_torch(bps: Any) -> bool:
    if bps.rank() == 1:  # to import torch takes longer than all else, so that one rank does
        array = np.arange(3_000_000, dtype=np.float32).reshape(3, -1) + 1
        bps.push_pull_inplace(array, average=True, name="gradient")
        return bool((array == np.arange(3_000_000, dtype=np.float32).reshape(3, -1) + 0.5).all())
    import torch

    tensor = torch.arange(3_000_000, dtype=torch.float32).reshape(3, -1) + bps.rank()
    address = tensor.data_ptr()
    bps.push_pull_inplace(tensor, average=True, name="gradient")
    mean = (bps.size() - 1) / 2
    right = torch.equal(tensor, torch.arange(3_000_000, dtype=torch.float32).reshape(3, -1) + mean)
    return right and tensor.data_ptr() == address


@pytest.mark.long
def test_a_torch_tensor_in_place():
    assert harness.run(in_place_by_torch, workers=2, env=RDMA, timeout=250) == [True, True]


def spread(bps: Any) -> list[str]:
    bps.push_pull(np.ones(1000, np.float32), name="x")
    return list(bps.metrics()["transports"])


def test_data_goes_over_rdma_and_nothing_else():
    """Asking for rdma gives rdma, also where shared memory would be nearer."""
    for names in harness.run(spread, workers=2, env=RDMA):
        assert set(names) <= {"rdma", "self"}
        assert "rdma" in names

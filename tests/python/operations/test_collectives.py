# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter, all_gather, broadcast, push and pull apart, barrier: all against numpy."""

import itertools
import random
import time
from typing import Any

import harness
import numpy as np
import pytest
from bodies.collectives import averages_and_shapes, broadcasts, mixed_kinds, pushes_and_pulls, scatter_and_gather
from hypothesis import given
from hypothesis import strategies as st

import bps_rdma

TOPOLOGIES = [
    (1, None, {}),
    (2, None, {"BPS_TRANSPORT": "shm"}),
    (3, None, {"BPS_TRANSPORT": "tcp"}),
    (3, None, {"BPS_TRANSPORT": "shm", "BPS_SHM_CMA": "0"}),
    (4, None, {"BPS_TRANSPORT": "auto"}),
    (2, 1, {"BPS_TRANSPORT": "tcp"}),
    (3, 2, {"BPS_TRANSPORT": "shm"}),
    (4, 3, {"BPS_TRANSPORT": "tcp", "BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}),
]
SMALL_PARTITIONS = harness.cut_at(8192)
everywhere = pytest.mark.parametrize(("workers", "servers", "env"), TOPOLOGIES)


@everywhere
@pytest.mark.parametrize("memory", ["plain", "empty"])
def test_reduce_scatter_and_all_gather(workers, servers, env, memory):
    harness.run(scatter_and_gather, memory, workers=workers, servers=servers, env=SMALL_PARTITIONS | env)


@everywhere
@pytest.mark.parametrize("body", [averages_and_shapes, broadcasts, pushes_and_pulls])
def test_other_operations(workers, servers, env, body):
    harness.run(body, workers=workers, servers=servers, env=SMALL_PARTITIONS | env)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@harness.on_ranks("transport", workers=3)
def test_a_gathered_part_may_be_changed_or_lie_in_the_result(bps: Any) -> None:
    """The part is changed as soon as the gather has been started; and it may lie anywhere in `out`."""
    rank, size, count = bps.rank(), bps.size(), 4 << 20
    part = np.full(count, rank, np.float32)
    out = np.full(size * count, -1, np.float32)
    handle = bps.all_gather_async(part, name="g", out=out)
    part[...] = 99
    assert np.array_equal(handle.wait().reshape(size, count)[:, ::1000], np.indices((size, count))[0][:, ::1000])
    for name, prepare in (("at the start", False), ("prepared", True)):
        out[:count] = rank
        if prepare:
            bps.prepare("all_gather", out[:count], name=name, out=out)()
        else:
            bps.all_gather(out[:count], name, out=out)
        assert np.array_equal(out.reshape(size, count)[:, ::1000], np.indices((size, count))[0][:, ::1000]), name


@harness.on_ranks(workers=2)
def test_what_is_only_moved_is_not_reduced(bps: Any) -> None:
    from bps_rdma.operations import OperationOptions, ReduceOp, start

    for op in (ReduceOp.average, ReduceOp.product):
        options = OperationOptions(op, f"moved by {op.name}")
        own = np.full(4, 3.0 + bps.rank(), np.float32)
        found = start.all_gather(own, None, options).wait()
        np.testing.assert_array_equal(found, [3] * 4 + [4] * 4)
        start.broadcast(own, 1, options._replace(name=f"told by {op.name}")).wait()
        np.testing.assert_array_equal(own, [4] * 4)
        for method in (start.store, start.unstore):
            arguments = (own, 1) if method is start.store else (own,)
            method(*arguments, options._replace(name=f"kept by {op.name}")).wait()
            np.testing.assert_array_equal(own, [4] * 4)


def pull_waits(bps: Any) -> float:
    """Rank 0 pulls long before rank 1 pushes."""
    if bps.rank() == 1:
        time.sleep(1.0)
        pushed_at = time.monotonic()
        bps.push(np.full(10_000, 2.0), "x", average=False)
        bps.pull(np.empty(10_000), "x", average=False)
        return pushed_at
    bps.push(np.full(10_000, 1.0), "x", average=False)  # does not wait for anybody
    result = bps.pull(np.empty(10_000), "x", average=False)
    assert np.all(result == 3)
    return time.monotonic()


def test_a_pull_waits_for_the_last_push(transport):
    pulled_at, pushed_at = harness.run(pull_waits, workers=2, env={"BPS_TRANSPORT": transport})
    assert pulled_at >= pushed_at


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (2, "tcp")])
def test_operations_of_all_kinds_at_once(servers, transport):
    harness.run(mixed_kinds, workers=3, servers=servers, env={"BPS_TRANSPORT": transport})


def barriers(bps: Any) -> list[tuple[float, float]]:
    order = random.Random(bps.rank())
    found = []
    for _ in range(30):
        time.sleep(order.random() * 0.02)
        entered = time.monotonic()
        bps.barrier()
        found.append((entered, time.monotonic()))
    return found


@pytest.mark.parametrize("servers", [None, 1])
def test_nobody_leaves_a_barrier_before_all_have_come(servers):
    ranks = harness.run(barriers, workers=3, servers=servers)
    for visits in zip(*ranks, strict=True):
        assert min(left for _, left in visits) >= max(entered for entered, _ in visits)


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_shard_bounds_cut_as_torch_chunk(count, parts):
    bounds = [bps_rdma.shard_bounds(count, parts, index) for index in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) == -(-count // parts)
    assert len({size for size in sizes if size not in (0, sizes[0])}) <= 1, "only one part is shorter"


@harness.on_ranks(workers=2)
def test_results_that_would_overwrite_what_is_still_sent_are_refused(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    memory = np.arange(1001, dtype=np.float32)
    array, shifted = memory[:-1], memory[1:]
    begin, end = bps.shard_bounds(1000, size, rank)
    for start in (
        lambda: bps.reduce_scatter(array, "r", out=memory[begin + 1 : end + 1]),
        lambda: bps.prepare("reduce_scatter", array, "r", out=memory[begin + 1 : end + 1]),
        lambda: bps.prepare("push_pull", array, "p", out=shifted),
        lambda: bps.accumulate(array, out=shifted, name="a"),
    ):
        with pytest.raises(bps.InvalidTensorError, match="`out` overlaps the array"):
            start()
    assert memory.tolist() == list(range(1001))
    assert bps.prepare("push_pull", array, "p", average=False, out=array)().tolist() == [size * i for i in range(1000)]
    part = bps.reduce_scatter(array, "r", average=False, out=array[begin:end])
    assert part.tolist() == [size * size * i for i in range(begin, end)]
    other = memory[1 - rank : 1001 - rank]  # overlaps the array on both ranks
    for start in (
        lambda: bps.all_to_all(array, "t", out=array),
        lambda: bps.all_to_all(array, "t", sizes=[500, 500], out_sizes=[500, 500], out=shifted),
        lambda: bps.all_to_all(array, "t", sizes=[500, 500], out=other),
        lambda: bps.scatter(array, "s", root=rank, out=memory[begin + 1 : end + 1]),
        lambda: bps.push_pull_many([array, shifted], "m", inplace=True),
        lambda: bps.push_pull_many({"a": array, "b": memory[:3]}, inplace=True),
    ):
        before = memory.copy()
        with pytest.raises(bps.InvalidTensorError, match="overlap"):
            start()
        assert memory.tolist() == before.tolist()


@harness.on_ranks(workers=2)
def test_parts_that_are_replaced_where_they_lie(bps: Any) -> None:
    """`out` may be what the array's own part is in, and arrays that only touch may be summed in place together."""
    rank, size, count = bps.rank(), bps.size(), 5000
    whole = np.arange(size * count, dtype=np.float32)
    part = np.empty(count, np.float32)
    bps.scatter(whole if rank == 1 else None, "s", root=1, out=whole[count:] if rank == 1 else part)
    assert (whole[count:] if rank == 1 else part)[:2].tolist() == [rank * count, rank * count + 1]
    whole[:count] = rank
    for uneven in (False, True):  # the part of rank 0 comes where that of rank 1 has been
        found = bps.gather(whole[:count], f"g{uneven}", root=1, uneven=uneven, out=whole if rank == 1 else None)
        if rank == 1:
            assert found.reshape(size, count)[:, :2].tolist() == [[0, 0], [1, 1]], uneven
            whole[:count] = 1
    whole[...] = rank
    bps.push_pull_many({"a": whole[:count], "b": whole[count:], "c": whole[3:3]}, average=False, inplace=True)
    assert whole.tolist() == [1] * (size * count)


@pytest.mark.parametrize("env", [{"BPS_HOST_SUM": "0"}, {"BPS_HOST_SUM": "1"}], ids=["0", "1"])
@harness.on_ranks("env", workers=3)
def test_a_broadcast_for_which_roots_differ_is_refused(bps: Any) -> None:
    """Two ranks, one or none would send then."""
    array, rank = np.full(5, bps.rank() + 1.0), bps.rank()
    for index, root in enumerate((min(rank, 1), 1 if rank == 2 else 0, (rank + 1) % 3)):
        with pytest.raises(bps.MismatchError, match="different roots"):
            bps.broadcast(array, f"b{index}", root=root)
        assert array.tolist() == [rank + 1] * 5
    assert bps.broadcast(array, "b0", root=2).tolist() == [3] * 5

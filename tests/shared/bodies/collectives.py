# SPDX-License-Identifier: Apache-2.0
"""Every collective operation, against numpy."""

import functools
import random
from typing import Any

import harness
import numpy as np
from reference.values import NUMPY_DTYPES, pushed, summed

# Empty, fewer than ranks, uneven, even, several partitions per part.
COUNTS = (0, 1, 2, 7, 64, 1001, 20_000)


def scatter_and_gather(bps: Any, memory: str) -> None:
    rank, size = bps.rank(), bps.size()
    make = bps.empty if memory == "empty" else np.empty
    for dtype in NUMPY_DTYPES:
        for count in COUNTS:
            name = f"{dtype} {count}"
            begin, end = bps.shard_bounds(count, size, rank)
            expected = summed(count, dtype, range(size))
            mine = make(count, dtype)
            mine[...] = pushed(count, dtype, rank)

            part = bps.reduce_scatter(mine, average=False, name=f"rs {name}")
            assert part.dtype == dtype
            assert np.array_equal(part, expected[begin:end]), f"reduce_scatter {name}"
            assert np.array_equal(mine, pushed(count, dtype, rank)), "reduce_scatter changed its input"

            # Into the own part of the array itself; the other parts stay.
            bps.reduce_scatter(mine, average=False, name=f"rs {name}", out=mine[begin:end])
            kept = pushed(count, dtype, rank)
            kept[begin:end] = expected[begin:end]
            assert np.array_equal(mine, kept), f"reduce_scatter in place {name}"

            whole = make(count, dtype)
            whole[...] = 0
            bps.all_gather(part, name=f"ag {name}", out=whole)
            assert np.array_equal(whole, expected), f"all_gather {name}"
            # The own part lies where it belongs already.
            assert bps.all_gather(mine[begin:end], name=f"ag {name}", out=mine) is mine
            assert np.array_equal(mine, expected), f"all_gather in place {name}"


def averages_and_shapes(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    matrix = pushed(6000, "float64", rank).reshape(60, 100)
    begin, end = bps.shard_bounds(6000, size, rank)
    mean = (summed(6000, "float64", range(size)) / size)[begin:end]
    assert np.array_equal(bps.reduce_scatter(matrix, name="mean"), mean), "average is the default"
    floor = (summed(6000, "int64", range(size)) // size)[begin:end]
    assert np.array_equal(bps.reduce_scatter(pushed(6000, "int64", rank), name="floor"), floor)

    rows = np.full((2, 5), rank, np.int32)
    gathered = bps.all_gather(rows, name="rows")
    assert gathered.shape == (2 * size, 5)
    assert np.array_equal(gathered, np.repeat(np.arange(size, dtype=np.int32), 10).reshape(-1, 5))
    assert bps.all_gather(np.float64([rank]), name="numbers").tolist() == [float(r) for r in range(size)]


def broadcasts(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for dtype in NUMPY_DTYPES:
        for count in COUNTS:
            for root in range(size):
                array = pushed(count, dtype, rank, root)
                assert bps.broadcast(array, root=root, name=f"{dtype} {count}") is array
                assert np.array_equal(array, pushed(count, dtype, root, root)), f"{dtype} {count} from {root}"
    root = (size - 1, size - 1)
    matrix = np.full((30, 70), rank, np.float32)
    assert bps.broadcast(matrix, root[0], "matrix").shape == (30, 70)
    assert np.all(matrix == size - 1)


def pushes_and_pulls(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    order = random.Random(rank)
    names = [f"n{i}" for i in range(5)]
    count = 3001
    for block in range(6):
        rounds = range(block * 4, block * 4 + 4)
        # Four rounds of five names are pushed before the first is pulled, in an order of each rank's own.
        todo = [name for name in names for _ in rounds]
        order.shuffle(todo)
        done = dict.fromkeys(names, 0)
        for name in todo:
            scratch = pushed(count, "int32", rank, rounds[done[name]], names.index(name))
            bps.push(scratch, name, average=False)
            scratch[...] = -1  # push() has taken its bytes
            done[name] += 1
        order.shuffle(todo)
        done = dict.fromkeys(names, 0)
        for name in todo:
            result = np.empty(count, np.int32)
            assert bps.pull(result, name, average=False) is result
            expected = summed(count, "int32", range(size), rounds[done[name]], names.index(name))
            assert np.array_equal(result, expected), f"{name} round {rounds[done[name]]}"
            done[name] += 1
    values = np.full(9, rank, np.float32)
    bps.push(values, "mean")
    assert bps.pull(np.empty(9, np.float32), "mean").tolist() == [(size - 1) / 2] * 9


def mixed_kinds(bps: Any) -> None:
    """All operations at once from several threads, each name with one kind; then one name changes its kind."""
    rank, size = bps.rank(), bps.size()

    def loop(index: int) -> None:
        for round_ in range(60):
            count = 500 + 100 * index
            expected = summed(count, "int64", range(size), round_, index)
            mine = pushed(count, "int64", rank, round_, index)
            begin, end = bps.shard_bounds(count, size, rank)
            if index == 0:
                assert np.array_equal(bps.push_pull(mine, False, "a"), expected)
            elif index == 1:
                assert np.array_equal(bps.reduce_scatter(mine, False, "b"), expected[begin:end])
            elif index == 2:
                bps.broadcast(mine, round_ % size, "c")
                assert np.array_equal(mine, pushed(count, "int64", round_ % size, round_, index))
            elif index == 3:
                bps.push(mine, "d", False)
                assert np.array_equal(bps.pull(mine, "d", False), expected)
            else:
                bps.barrier()

    harness.in_threads(*(functools.partial(loop, index) for index in range(5)))
    for round_ in range(5):
        expected = summed(500, "int64", range(size), round_)
        mine = pushed(500, "int64", rank, round_)
        begin, end = bps.shard_bounds(500, size, rank)
        assert np.array_equal(bps.push_pull(mine, False, "a"), expected)
        bps.push(mine, "a", False)
        assert np.array_equal(bps.pull(np.empty(500, np.int64), "a", False), expected)
        assert np.array_equal(bps.reduce_scatter(mine, False, "a"), expected[begin:end])
        bps.broadcast(mine, 0, "a")
        assert np.array_equal(mine, pushed(500, "int64", 0, round_))

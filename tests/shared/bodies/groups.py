# SPDX-License-Identifier: Apache-2.0
"""Operations of groups of ranks."""

from typing import Any

import numpy as np
from reference.values import pushed, summed

COUNT = 5000


def disjoint_groups(bps: Any, rounds: int = 100) -> None:
    rank = bps.rank()
    mine = [0, 1] if rank < 2 else [2, 3]
    group = bps.new_group(mine)
    assert group.ranks == tuple(mine)
    assert group.size == 2
    for round_ in range(rounds):
        value = float(10**rank + round_)
        # The same name three times: in this group, in the other one, and in the world.
        handles = [
            bps.push_pull_async(pushed(COUNT, "int32", rank, round_), False, "w", group=group),
            bps.push_pull_async(np.full(3, value), True, "mean", group=group),
            bps.push_pull_async(np.full(3, value), False, "mean"),
        ]
        part, mean, everybody = bps.wait(handles if rank % 2 else handles[::-1])[:: 1 if rank % 2 else -1]
        assert np.array_equal(part, summed(COUNT, "int32", mine, round_))
        assert mean.tolist() == [sum(10**r for r in mine) / 2 + round_] * 3, "average divides by the group's size"
        assert everybody.tolist() == [1111.0 + 4 * round_] * 3
    bps.barrier(group)
    bps.barrier()


def overlapping_groups(bps: Any, rounds: int = 50) -> None:
    rank = bps.rank()
    sets = [[0, 1], [1, 2], [0, 2], [0, 1, 2], [rank]]
    mine = [ranks for ranks in sets if rank in ranks]
    groups = {tuple(ranks): bps.new_group(ranks) for ranks in mine}
    for round_ in range(rounds):
        order = mine if (rank + round_) % 2 else mine[::-1]
        handles = [
            bps.push_pull_async(pushed(COUNT, "int32", rank, round_), False, "w", group=groups[tuple(ranks)])
            for ranks in order
        ]
        for ranks, result in zip(order, bps.wait(handles), strict=True):
            assert np.array_equal(result, summed(COUNT, "int32", ranks, round_)), ranks


def collectives_in_a_group(bps: Any) -> None:
    rank = bps.rank()
    if rank == 1:
        bps.barrier()
        return
    ranks = [0, 2, 3]
    place = ranks.index(rank)
    group = bps.new_group([3, 0, 2], name="without 1")
    begin, end = bps.shard_bounds(COUNT, 3, place)
    part = bps.reduce_scatter(pushed(COUNT, "int64", rank), average=False, name="rs", group=group)
    assert np.array_equal(part, summed(COUNT, "int64", ranks)[begin:end])
    whole = np.zeros(COUNT, np.int64)
    bps.all_gather(part, name="ag", group=group, out=whole)
    assert np.array_equal(whole, summed(COUNT, "int64", ranks))
    for root in ranks:
        array = pushed(COUNT, "float32", rank)
        bps.broadcast(array, root=root, name=f"bc {root}", group=group)
        assert np.array_equal(array, pushed(COUNT, "float32", root))
    bps.push(pushed(COUNT, "int32", rank), "pp", average=False, group=group)
    result = bps.pull(np.empty(COUNT, np.int32), "pp", average=False, group=group)
    assert np.array_equal(result, summed(COUNT, "int32", ranks))
    bps.barrier(group)
    bps.barrier()

# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host sum among themselves first; one contribution per host crosses the network.

The hosts of these jobs are one machine, told apart by BPS_HOST_ID.
"""

import functools
import operator
import sys
from typing import Any

import harness
import numpy as np
import pytest
from bodies.arrays import caught, changed
from bodies.call_order import fast_and_slow, random_orders
from bodies.collectives import averages_and_shapes, broadcasts, mixed_kinds, pushes_and_pulls, scatter_and_gather
from bodies.groups import collectives_in_a_group, disjoint_groups, overlapping_groups
from bodies.hosts import PARTITION, SMALL_PARTITIONS, used
from bodies.sums import interleaved_rounds
from harness import await_mark, mark

# By rank, one letter per host; then dedicated servers.
LAYOUTS = [
    ("aabb", None, {}),
    ("aaab", None, {}),
    ("abab", None, {"BPS_SHM_CMA": "0"}),
    ("aabbc", None, {"BYTEPS_PUSH_THREAD": "2"}),
    ("aabb", 1, {}),
    ("abbb", 2, {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}),
]
on_layouts = pytest.mark.parametrize(("layout", "servers", "env"), LAYOUTS)


def run(body: Any, *args: Any, layout: str, servers: int | None = None, env: Any = None, **options: Any) -> list[Any]:
    env = SMALL_PARTITIONS | (env or {})
    return harness.run(body, *args, servers=servers, env=env, **harness.on_hosts(layout), **options)


@on_layouts
@pytest.mark.parametrize("memory", ["plain", "empty"])
def test_reduce_scatter_and_all_gather(layout, servers, env, memory):
    run(scatter_and_gather, memory, layout=layout, servers=servers, env=env)


def everything(bps: Any) -> int:
    broadcasts(bps)
    pushes_and_pulls(bps)
    interleaved_rounds(bps, "empty", 20)
    return used(bps)


@on_layouts
def test_every_other_operation(layout, servers, env):
    assert sum(run(everything, layout=layout, servers=servers, env=env)) > 0
    run(averages_and_shapes, layout=layout, servers=servers, env=env)


@pytest.mark.parametrize("servers", [None, 2])
@pytest.mark.parametrize("layout", ["aabb", "abab", "aaab"])
def test_groups_within_and_across_hosts(layout, servers):
    for body in (disjoint_groups, collectives_in_a_group):
        run(body, layout=layout, servers=servers)


def test_overlapping_groups_and_orders():
    run(overlapping_groups, layout="aab")
    run(mixed_kinds, layout="aabb")


@pytest.mark.parametrize("servers", [None, 1])
def test_ranks_in_different_orders(servers):
    run(random_orders, 30, layout="aabb", servers=servers)
    run(fast_and_slow, 16, 100, layout="aab", servers=servers)


# ---- What is summed, and what travels


def sums_of_random_bits(bps: Any) -> tuple[bool, bool]:
    """Whether the result has the bits that the documented order gives, and whether it has those of rank order."""
    ranks = range(bps.size())
    values = [np.random.default_rng(rank).standard_normal(20_001).astype(np.float32) for rank in ranks]
    hosts: dict[str, list[Any]] = {}
    for rank, host in zip(ranks, "abab", strict=True):
        hosts.setdefault(host, []).append(values[rank])
    by_host = functools.reduce(operator.add, [functools.reduce(operator.add, parts) for parts in hosts.values()])
    by_rank = functools.reduce(operator.add, values)
    result = bps.push_pull(values[bps.rank()], False, "bits")
    return bool((result == by_host).all()), bool((result == by_rank).all())


@pytest.mark.parametrize("servers", [None, 1])
def test_a_host_adds_its_ranks_in_order_and_hosts_are_added_in_order(servers):
    assert run(sums_of_random_bits, layout="abab", servers=servers) == [(True, False)] * 4


@pytest.mark.parametrize("servers", [None, 1])
def test_without_host_sums_ranks_are_added_in_order(servers):
    assert run(sums_of_random_bits, layout="abab", servers=servers, env={"BPS_HOST_SUM": "0"}) == [(False, True)] * 4


def means_of_integers(bps: Any, values: list[int]) -> int | str:
    try:
        return int(bps.push_pull(np.full(5000, values[bps.rank()], np.int8), name="mean")[-1])
    except bps.InvalidArgumentError as error:
        bps.barrier()  # the job goes on
        return str(error)


@pytest.mark.parametrize("servers", [None, 1])
def test_means_of_integers_are_right_or_refused(servers):
    assert run(means_of_integers, [100, 27, 120, -90], layout="aabb", servers=servers) == [39] * 4
    # The sum of the host of ranks 0 and 1 does not fit int8, the mean of all does.
    values = [100, 100, 20, 20]
    for error in run(means_of_integers, values, layout="aabb", servers=servers):
        assert "'mean'" in str(error)
        assert "does not fit int8" in str(error)
    one_by_one = run(means_of_integers, values, layout="aabb", servers=servers, env={"BPS_HOST_SUM": "0"})
    assert one_by_one == [60] * 4


def averages_of_large_halves(bps: Any) -> list[float]:
    """The sum of a host is beyond what float16 holds, the average of all is not."""
    half = np.full(5000, 60_000 - 1000 * bps.rank(), np.float16)
    result = bps.push_pull(half, True, "large")
    assert (result == result[0]).all()
    return [float(result[0])]


@pytest.mark.parametrize("layout", ["aabb", "aaab", "abcc"])
def test_the_average_of_large_float16_does_not_overflow(layout):
    assert run(averages_of_large_halves, layout=layout) == [[58_496.0]] * 4  # of 58,500; float16 counts by 32 there


def one_tensor(bps: Any, count: int) -> int:
    bps.push_pull(np.ones(count, np.float32), False, "x")
    return used(bps)


def test_a_server_gets_one_push_per_host():
    partitions = 12
    count = partitions * PARTITION // 4
    options = {"servers": 2, "python_servers": True, "env": SMALL_PARTITIONS | {"BPS_PLACEMENT": "dedicated"}}
    with harness.start(one_tensor, count, **options, **harness.on_hosts("aaabbc")) as job:
        assert sum(job.results()) == 2 * partitions, "hosts a and b; rank 5 is alone"
        metrics = job.server_metrics()
    assert sum(one["pushes"] for one in metrics) == 3 * partitions
    assert sum(one["rounds"] for one in metrics) == partitions


def inside(bps: Any) -> float:
    group = bps.new_group([0, 1] if bps.rank() < 2 else [2, 3])
    return float(bps.push_pull(np.ones(40_000, np.float32), False, "inside", group=group).sum())


@pytest.mark.parametrize("servers", [None, 1])
def test_a_group_on_one_host_does_not_leave_it(servers):
    with harness.start(inside, servers=servers, python_servers=True, **harness.on_hosts("aabb")) as job:
        assert job.results() == [80_000.0] * 4
        assert [one["pushes"] for one in job.server_metrics()] == [0] * (servers or 0)


def transports(bps: Any) -> list[str]:
    bps.push_pull(np.ones(100_000, np.float32), False, "x")
    return list(bps.metrics()["transports"])


def test_a_rank_connects_to_few_ranks_of_other_hosts():
    for rank, kinds in enumerate(run(transports, layout="aaabbb")):
        assert sorted(kinds) == ["self", "shm", "shm", "tcp"], f"rank {rank}: one on the other host"


def test_one_rank_that_does_not_want_to_is_enough():
    options = harness.on_hosts("aabb")
    options["rank_env"][3] = options["rank_env"][3] | {"BPS_HOST_SUM": "0"}
    assert harness.run(one_tensor, 1000, **options) == [0] * 4


def test_one_rank_on_each_host_sums_as_ever():
    assert run(one_tensor, 1000, layout="abcd") == [0] * 4


# ---- What goes wrong


def gives_up(bps: Any, first: int, late: int) -> dict[str, Any]:
    """All but one rank call, and give up, one of them soon; then that one calls, and then all do."""
    bps.push_pull(np.ones(10, np.float32), name="warm")
    array = bps.empty(200_000)
    array.fill(1)
    rank = bps.rank()
    if rank == late:
        await_mark("raised", *(one for one in range(4) if one != late))
    limit = 20 if rank == late else 0.4 * harness.PATIENCE if rank == first else 60
    found = {"error": caught(lambda: bps.push_pull_inplace(array, False, "x", timeout=limit))}
    array.fill(1000)
    mark("raised")
    await_mark("raised", *range(4))
    found["changed"] = changed(array, 1000)
    bps.barrier()
    array.fill(1)
    found["next"] = caught(lambda: bps.push_pull_inplace(array, False, "x")) or changed(array, bps.size())
    bps.barrier()
    harness.eventually(lambda: bps.metrics()["total"]["open_rounds"] == 0, what="the end of all rounds")
    return found


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize(("first", "late"), [(0, 1), (0, 3), (2, 1)])
def test_a_deadline_is_final_on_all_hosts(first, late, servers):
    options = harness.on_hosts("aabb")
    results = harness.run(gives_up, first, late, servers=servers, env=SMALL_PARTITIONS, **options)
    for rank, found in enumerate(results):
        assert found["error"].startswith("DeadlineError"), (rank, found)
        assert found["changed"] == "", (rank, found)
        assert found["next"] == "", (rank, found)
    told = next(found for rank, found in enumerate(results) if rank not in (first, late))
    assert f"rank {first} gave up" in told["error"], results


def disagrees(bps: Any, other: int) -> list[str]:
    """One rank calls another operation; the next round works."""
    array = np.ones(50_000, np.float32)
    error = caught(lambda: bps.push_pull(array, name="m", average=bps.rank() == other))
    bps.barrier()
    return [error, caught(lambda: bps.push_pull(array, name="m", average=False))]


@pytest.mark.parametrize("other", [1, 2])
def test_ranks_that_disagree_are_told_on_all_hosts(other):
    for rank, (error, again) in enumerate(run(disagrees, other, layout="aabb")):
        assert error.startswith("MismatchError"), (rank, error)
        assert again == "", (rank, again)


def rounds_until_lost(bps: Any) -> str:
    array = bps.empty(300_000)
    for round_ in range(1_000_000):
        array.fill(bps.rank() + 1)
        try:
            bps.push_pull_inplace(array, False, "x")
        except bps.PeerLostError as error:
            return str(error)
        if round_ == 5:
            mark("running")
        wrong = changed(array, bps.size() * (bps.size() + 1) / 2)
        assert not wrong, (round_, wrong)
    return "never"


@pytest.mark.parametrize("servers", [None, 2])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_lost_rank_is_named_on_all_hosts(victim, servers):
    options = {"servers": servers, "env": SMALL_PARTITIONS | {"BPS_SHUTDOWN_TIMEOUT": "2"}}
    for told in harness.run(rounds_until_lost, kills=f"rank {victim}", **options, **harness.on_hosts("aabb")):
        assert f"worker {victim}" in told


def waits_for_a_rank_that_failed(bps: Any) -> str:
    bps.push_pull(np.ones(10, np.float32), name="warm")
    bps.barrier()  # or rank 3 might take with it what others have not got yet
    if bps.rank() == 3:
        sys.excepthook(ValueError, ValueError("no such file"), None)
        return ""
    return caught(lambda: bps.push_pull(np.ones(50_000, np.float32), name="x"))


def test_an_exception_is_told_on_all_hosts():
    options = {"env": SMALL_PARTITIONS | {"BPS_SHUTDOWN_TIMEOUT": "2"}}
    with harness.start(waits_for_a_rank_that_failed, **options, **harness.on_hosts("aabb")) as job:
        outcomes = job.outcomes()
    for rank in range(3):
        assert "PeerLostError" in outcomes[rank].value, outcomes[rank]
        assert "rank 3 ended: ValueError: no such file" in outcomes[rank].value, outcomes[rank]

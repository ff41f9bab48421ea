# SPDX-License-Identifier: Apache-2.0
"""Ranks that do things in different orders and at different speeds: nothing blocks for good, and no round mixes."""

import random
from typing import Any

import harness
import numpy as np
import pytest
from bodies.call_order import KIB, far_ahead, fast_and_slow, last_slot_taken_before, random_orders, urgent_behind_bulk


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (2, "tcp")])
@harness.on_ranks("servers", "transport", workers=3)
def test_names_declared_in_different_orders(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    names = [f"tensor {i}" for i in range(200)]
    counts = {name: 10 + i for i, name in enumerate(names)}
    mine = random.Random(rank).sample(names, len(names))
    for name in mine[: 50 * rank]:  # some one by one, some at once, some not at all
        bps.declare(name, shape=counts[name], dtype="int32")
    bps.declare_many({name: (counts[name], "int32") for name in mine[: 150 - 20 * rank]})
    random.Random(100 + rank).shuffle(mine)
    handles = {
        name: bps.push_pull_async(np.full(counts[name], rank * 1000 + counts[name], np.int32), False, name)
        for name in mine
    }
    for name in names:
        result = bps.synchronize(handles[name])
        expected = size * counts[name] + 1000 * sum(range(size))
        assert result.shape == (counts[name],)
        assert np.all(result == expected), name


SMALL_PARTITIONS = harness.cut_at(12 * KIB)
SMALLEST_WINDOW = {"BPS_TRANSPORT": "tcp", "BPS_SERVER_WINDOW": "1"}
TINY_STAGING = {"BPS_TRANSPORT": "shm", "BPS_SHM_CMA": "0", "BPS_STAGING_BYTES": "65536"}


# Each case has 1,000 rounds of one tensor, together 8,000; twice as many in `ci/test --all`.
@pytest.mark.parametrize(
    ("workers", "servers", "env"),
    [
        (2, None, SMALLEST_WINDOW),
        (3, 1, SMALLEST_WINDOW),
        (4, 2, SMALLEST_WINDOW),
        (2, 1, SMALLEST_WINDOW | {"BYTEPS_SCHEDULING_CREDIT": "1"}),
        (3, None, SMALLEST_WINDOW | {"BYTEPS_SCHEDULING_CREDIT": "20000"}),
        (2, None, TINY_STAGING),
        (3, 2, TINY_STAGING | {"BYTEPS_SCHEDULING_CREDIT": "2"}),
        (3, 1, SMALLEST_WINDOW | {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}),
    ],
)
def test_random_orders_never_block(workers, servers, env):
    assert harness.run(random_orders, workers=workers, servers=servers, env=SMALL_PARTITIONS | env) == [0] * workers


def test_a_worker_without_slots_gets_one_when_only_it_is_missing():
    env = {"BPS_TRANSPORT": "tcp", "BPS_SERVER_WINDOW": "2", "BYTEPS_SERVER_ENGINE_THREAD": "1", "BPS_TIMEOUT": "20"}
    harness.run(last_slot_taken_before, workers=3, servers=1, env=env)


@pytest.mark.parametrize("rounds", [300, pytest.param(1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("ahead", [1, 16])
@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (1, "shm"), (2, "tcp")])
def test_rounds_of_a_fast_and_a_slow_rank_never_mix(servers, transport, ahead, rounds):
    env = {"BPS_TRANSPORT": transport}
    assert harness.run(fast_and_slow, ahead, rounds, workers=2, servers=servers, env=env) == [0, 0]


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (1, "tcp")])
def test_a_rank_may_be_hundreds_of_rounds_ahead(servers, transport):
    harness.run(far_ahead, workers=2, servers=servers, env={"BPS_TRANSPORT": transport})


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (1, "tcp")])
def test_an_urgent_tensor_overtakes_a_large_one(servers, transport):
    # 8 MB in pieces of 8 kB, one on its way at a time: loops do not wait for each other.
    env = {"BYTEPS_PARTITION_BYTES": "8000", "BPS_MIN_PARTITION_BYTES": "8000", "BYTEPS_SCHEDULING_CREDIT": "1"}
    env |= {"BPS_TRANSPORT": transport, "BYTEPS_PUSH_THREAD": "1", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    for bulk_was_over, _, right in harness.run(urgent_behind_bulk, 10, workers=2, servers=servers, env=env):
        assert right
        assert not bulk_was_over
    for bulk_was_over, pieces, right in harness.run(urgent_behind_bulk, -10, workers=2, servers=servers, env=env):
        assert right
        # Servers do not wait for each other: what is less urgent waits for the bulk of its own server, all or half.
        assert pieces >= (1000 if servers == 1 else 490), "a less urgent tensor overtook"
        assert bulk_was_over or servers != 1

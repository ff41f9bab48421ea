# SPDX-License-Identifier: Apache-2.0
"""Servers are lost and enter: only the partitions of a lost one move, and what moves is spread over the others."""

from collections import Counter
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE)}
SMALL_PARTITIONS = {"BPS_PARTITION_BYTES": str(4 * 1024), "BPS_MIN_PARTITION_BYTES": str(4 * 1024)}
# Of 48 and of 12 partitions, and many of one.
COUNTS = [48 * 1024, 12 * 1024] + [100 + i for i in range(40)]

Placement = dict[str, list[int]]  # by tensor: the identity of the server of each partition


def placement() -> Placement:
    from bps_rdma import job

    process = job.current().process
    identities = process.server_identities
    return {
        tensor.name: [identities[server] for server in process.servers_of(tensor)]
        for tensor in job.current().tensors.values()
        if tensor.name.startswith("t")
    }


def train(bps: Any, views: list[int]) -> list[Placement]:
    """Sums in views with so many servers, one after the other, and returns who has summed what in each."""
    found: list[Placement] = []
    arrays = [np.empty(count, np.float32) for count in COUNTS]
    while len(found) < len(views):
        from bps_rdma import job

        try:
            # Not in the order of the first view: placement does not depend on it.
            for i in range(len(arrays))[:: 1 if not found else -1]:
                arrays[i][:] = 1 + bps.rank()
                bps.push_pull_inplace(arrays[i], name=f"t{i}", average=False)
                assert arrays[i].min() == arrays[i].max() == bps.size() * (bps.size() + 1) / 2
            bps.commit()
            servers = job.current().process.servers
        except bps.RoundAbortedError:
            continue
        where = placement()  # of what has been used in this view, which may have begun in the middle of the step
        if servers == views[len(found)] and len(where) == len(arrays):
            found.append(where)
            mark(f"view-{len(found)}")
    await_mark("end")
    return found


def moved(before: Placement, after: Placement) -> tuple[list[tuple[int, int]], int]:
    """From and to, of each partition that has moved; and how many there are."""
    pairs = [pair for name in before for pair in zip(before[name], after[name], strict=True)]
    return [(was, now) for was, now in pairs if was != now], len(pairs)


@pytest.mark.parametrize("key_hash", ["raw", "djb2", "balanced"])
def test_only_the_partitions_of_a_lost_server_move(key_hash):
    told = {"BPS_MIN_WORKERS": "2", "BPS_SERVER_FAILOVER": "0"}  # every rank, at the end of a step
    env = FAST | SMALL_PARTITIONS | told | {"BYTEPS_KEY_HASH_FN": key_hash}
    with harness.start(train, [4, 3, 2, 3], workers=2, servers=4, env=env | harness.over("tcp")) as job:
        for view, server in enumerate(("server 1", "server 3"), start=1):
            job.await_marks(f"view-{view}")
            job.kill(server)
        job.await_marks("view-3")
        job.start_helper("server 1")
        job.await_marks("view-4")
        job.set_mark("end")
        outcomes = job.outcomes()
        assert all(outcome.value for outcome in outcomes), [outcome.error for outcome in outcomes]
        job.helper_statuses(but=["server 3"])
    first, second, third, fourth = outcomes[0].value
    assert outcomes[1].value == outcomes[0].value, "all ranks agree"
    servers = {each for owners in first.values() for each in owners}
    assert len(servers) == 4
    for before, after in ((first, second), (second, third)):
        moves, total = moved(before, after)
        lost = {owner for owners in before.values() for owner in owners} - {
            owner for owners in after.values() for owner in owners
        }
        assert len(lost) == 1
        assert {was for was, _ in moves} == lost, "nothing else moves"
        shares = Counter(now for _, now in moves)
        assert set(shares) == {owner for owners in after.values() for owner in owners}, "all others take some of it"
        assert max(shares.values()) <= (0.7 if len(shares) == 2 else 0.5) * len(moves)
        assert len(moves) <= 0.5 * total
    moves, total = moved(third, fourth)
    assert {now for _, now in moves} == {owner for owners in fourth.values() for owner in owners} - servers
    assert len(moves) <= 0.4 * total, "the server that has entered takes the share of one"


def test_a_large_tensor_is_spread_evenly_over_the_servers_that_are_left():
    env = FAST | SMALL_PARTITIONS | {"BPS_MIN_WORKERS": "2"} | harness.over("tcp")
    with harness.start(train, [4, 3], workers=2, servers=4, env=env) as job:
        job.await_marks("view-1")
        job.kill("server 2")
        job.await_marks("view-2")
        job.set_mark("end")
        before, after = job.outcomes()[0].value
        job.helper_statuses(but=["server 2"])
    for name, partitions in (("t0", 48), ("t1", 12)):
        assert len(before[name]) == len(after[name]) == partitions, "it is cut as before"
        assert set(Counter(before[name]).values()) == {partitions // 4}
        assert set(Counter(after[name]).values()) == {partitions // 3}

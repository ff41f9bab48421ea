# SPDX-License-Identifier: Apache-2.0
"""Somebody dies: everybody else gets PeerLostError naming it, soon, and can leave; nothing hangs, nothing is left."""

import time
from typing import Any

import harness
import numpy as np
import pytest
from bodies.losses import FAST, SOON_S
from harness import await_mark, mark


def blocked_in(bps: Any, where: str, victim: int) -> tuple[str, str, float]:
    """Waits for something that will never come; returns the error's class, its text, and when it came."""
    rank = bps.rank()
    bps.push_pull(np.ones(1000, np.float32), name="warm")
    if rank == victim:
        mark("ready")
        await_mark("never", timeout=60)
    try:
        if where == "barrier":
            mark("ready")
            bps.barrier()
        elif where == "idle":
            mark("ready")
            await_mark("go")
            bps.push_pull(np.ones(1000, np.float32), name="after")
        else:
            handle = bps.push_pull_async(np.ones(3_000_000, np.float32), name="blocked")
            mark("ready")
            bps.synchronize(handle)
    except bps.BpsError as error:
        came = time.monotonic()
        bps.shutdown()
        return type(error).__name__ if error.hint else "an error without a hint", str(error), came
    return "nothing", "", 0.0


@pytest.mark.rdma
@pytest.mark.parametrize("where", ["synchronize", "barrier", "idle"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_of_an_embedded_job(where, transport, victim):
    env = FAST | harness.over(transport)
    with harness.start(blocked_in, where, victim, workers=3, env=env) as job:
        job.await_marks("ready")
        killed = job.kill(f"rank {victim}")
        if where == "idle":
            time.sleep(0.5)
            job.set_mark("go")
        outcomes = job.outcomes(but=[victim])
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        kind, text, came = outcome.value
        assert kind == "PeerLostError", outcome.error + outcome.output
        assert f"worker {victim}" in text or (victim == 0 and "scheduler" in text), text
        assert came - killed < SOON_S
        assert outcome.status == 0


@pytest.mark.rdma
@pytest.mark.parametrize("member", ["server 1", "scheduler"])
def test_a_killed_server_or_scheduler(member, transport):
    env = FAST | harness.over(transport)
    with harness.start(blocked_in, "synchronize", 0, workers=2, servers=2, env=env) as job:
        job.await_marks("ready")
        killed = job.kill(member)
        outcome = job.outcomes(but=[0])[1]
        job.kill("rank 0")
        left = job.helper_statuses(but=[member])
    kind, text, came = outcome.value
    assert kind == "PeerLostError"
    assert ("server" if member == "server 1" else "scheduler") in text
    assert came - killed < SOON_S
    assert None not in left.values(), f"still running: {left}"


def counts_to(bps: Any, rounds: int) -> float:
    array = np.ones(10_000, np.float32)
    for _ in range(rounds):
        bps.push_pull_inplace(array, average=True, name="x")
    return float(array[0])


@pytest.mark.rdma
def test_the_next_job_starts_on_the_same_port_at_once(transport):
    env = harness.over(transport)
    port = harness.free_port()
    with harness.start(blocked_in, "synchronize", 1, workers=2, env=FAST | env, port=port) as job:
        job.await_marks("ready")
        job.kill("rank 1")
        job.outcomes(but=[1])
    for _ in range(3):
        assert harness.run(counts_to, 3, workers=2, env=env, port=port) == [1.0, 1.0]


@pytest.mark.rdma
@pytest.mark.parametrize("servers", [None, 2])
@harness.on_ranks(
    "servers",
    "transport",
    workers=2,
    env={
        "BPS_FAULT": "refuse=0.2,partial=0.4,hold=0.6,seed=5",
        "BYTEPS_PARTITION_BYTES": "8000",
        "BPS_SERVER_WINDOW": "2",
    },
)
def test_refused_partial_and_reordered_posts_change_nothing(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    good = True
    for round_ in range(60):
        handles = []
        for index, count in enumerate((1, 1000, 70_000)):
            array = np.full(count, rank + round_ + index, np.float32)
            handles.append(bps.push_pull_async_inplace(array, average=False, name=f"n{index}"))
        for index, handle in enumerate(handles):
            expected = sum(r + round_ + index for r in range(size))
            good &= bool((bps.synchronize(handle) == expected).all())
    assert good


def loses_connections(bps: Any) -> str:
    try:
        for _ in range(10_000):
            bps.push_pull(np.ones(100, np.float32), name="x")
    except bps.PeerLostError:
        bps.shutdown()
        return "PeerLostError"
    return "nothing"


@pytest.mark.rdma
def test_a_lost_connection_is_an_error_everywhere(transport):
    env = FAST | harness.over(transport) | {"BPS_FAULT": "lose_after=500"}
    with harness.start(loses_connections, workers=2, env=env) as job:
        found = [outcome.value for outcome in job.outcomes()]
    assert found == ["PeerLostError"] * 2


# ---- The cause of a failure


def follows_at_once(bps: Any, victim: int, follower: int) -> str:
    """Every rank but the victim reports whom its error names. The follower leaves without waiting for the others, the
    last rank looks only when both are gone."""
    rank = bps.rank()
    bps.push_pull(np.ones(1000, np.float32), name="warm")
    if rank == victim:
        mark("ready")
        await_mark("never", timeout=60)
    mark("ready")
    if rank != follower:
        await_mark("follower is gone")
    try:
        for _ in range(2000):
            bps.push_pull(np.ones(1000, np.float32), name="after")
    except bps.PeerLostError as error:
        bps.shutdown()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("servers", [None, 2])
@pytest.mark.parametrize("attempt", range(5))
def test_a_rank_that_only_followed_is_not_the_cause(transport, servers, attempt):
    victim, follower, last = [(2, 0, 1), (1, 2, 0), (2, 1, 0)][attempt % 3]
    # Nobody waits long for the others: the follower's connections are closed while the last rank still looks away.
    env = FAST | {"BPS_TRANSPORT": transport, "BPS_SHUTDOWN_TIMEOUT": "0.05"}
    with harness.start(follows_at_once, victim, follower, workers=3, servers=servers, env=env) as job:
        job.await_marks("ready")
        job.kill(f"rank {victim}")
        job.wait(f"rank {follower}")
        job.set_mark("follower is gone")
        outcomes = job.outcomes(but=[victim])
    for rank in (follower, last):
        text = outcomes[rank].value
        assert f"worker {victim}" in text, text + outcomes[rank].error + outcomes[rank].output
        assert f"worker {follower}" not in text, text

# SPDX-License-Identifier: Apache-2.0
"""A deadline is final: once a call has raised, nobody reads or writes its arrays any more, and no rank gets their sum.

All ranks of the round learn of it, and the next call of the same name is a new round on all of them.
"""

import time
from typing import Any

import harness
import numpy as np
import pytest
from bodies.arrays import COUNT, QUIET_S, caught, changed, make
from harness import await_mark, mark

BEFORE, AFTER = 1.0, 1000.0
LIMIT_S = 0.3


def late_rank(bps: Any, memory: str) -> dict[str, Any]:
    """Rank 0 gives up before rank 1 calls; both then go on with the same name."""
    rank = bps.rank()
    bps.push_pull(np.ones(10, np.float32), name="warm")
    array = make(bps, memory)
    array.fill(BEFORE)
    if rank == 1:
        await_mark("raised", 0)
    error = caught(lambda: bps.push_pull_inplace(array, False, "x", timeout=0.5 if rank == 0 else 60))
    found = {"error": error, "got": float(array[0])}
    array.fill(AFTER)
    mark("raised")
    await_mark("raised", 0, 1)
    time.sleep(QUIET_S)
    found["changed"] = changed(array, AFTER)
    bps.barrier()
    again = make(bps, memory)
    again.fill(BEFORE)
    found["next"] = caught(lambda: bps.push_pull_inplace(again, False, "x", timeout=60)) or changed(again, 2 * BEFORE)
    return found


@pytest.mark.parametrize(("memory", "servers"), [("mapped", None), ("plain", 1)])
def test_a_rank_that_comes_late_gets_an_error_and_no_sum(transport, servers, memory):
    first, late = harness.run(late_rank, memory, workers=2, servers=servers, env=harness.over(transport))
    assert first["error"].startswith("DeadlineError"), first
    assert late["error"], f"rank 1 got {late['got']} of a round that rank 0 has left"
    assert "x" in late["error"], f"it does not name the tensor: {late['error']}"
    for rank, found in enumerate((first, late)):
        assert not found["changed"], f"rank {rank}, after its call had raised: {found['changed']}"
        assert not found["next"], f"rank {rank}, the next round: {found['next']}"


def at_the_limit(bps: Any, memory: str) -> dict[str, Any]:
    """Rank 1 comes about when rank 0 gives up, each time a little later. A call gives the sum, or raises."""
    rank = bps.rank()
    array = make(bps, memory, 4 * COUNT)
    bps.push_pull_inplace(array, False, "x")
    errors, wrong = 0, []
    for round_ in range(9):
        array.fill(BEFORE)
        bps.barrier()
        if rank == 1:
            time.sleep(LIMIT_S + round_ * 0.03)  # the deadlines of operations are looked at four times a second
        limit = LIMIT_S if rank == 0 else 30
        error = caught(lambda limit=limit: bps.push_pull_inplace(array, False, "x", timeout=limit))
        if not error and (bad := changed(array, 2 * BEFORE)):
            wrong.append(f"round {round_}: no error, and {bad}")
        errors += bool(error)
        array.fill(AFTER)
        time.sleep(0.02)
        bps.barrier()
        if bad := changed(array, AFTER):
            wrong.append(f"round {round_}, after its end ({error or 'with a result'}): {bad}")
    return {"errors": errors, "wrong": wrong}


@pytest.mark.parametrize(
    ("transport", "memory", "servers"),
    [
        ("shm", "mapped", None),
        ("tcp", "plain", 1),
        pytest.param("shm", "plain", 1, marks=pytest.mark.long),
        pytest.param("tcp", "mapped", None, marks=pytest.mark.long),
    ],
)
def test_a_deadline_in_the_middle_of_a_round(transport, memory, servers):
    env = harness.over(transport) | {"BPS_TIMEOUT": "60"}
    first, second = harness.run(at_the_limit, memory, workers=2, servers=servers, env=env)
    assert not first["wrong"], f"rank 0: {first['wrong']}"
    assert not second["wrong"], f"rank 1: {second['wrong']}"
    assert first["errors"] > 0, "no deadline ended"

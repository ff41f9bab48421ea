# SPDX-License-Identifier: Apache-2.0
"""push() and pull() of a name go on together after one of them has raised: no rank gets the sum of another round."""

from typing import Any

import harness
import numpy as np
import pytest

JOBS = [(None, "shm"), (None, "tcp"), (2, "tcp")]


def check_rounds(bps: Any, name: str) -> None:
    """Each of the next rounds gives the sum of what was pushed to it, not that of the round before."""
    for base in (10, 100, 1000):
        bps.push(np.full(50_000, base + bps.rank(), np.int64), name, average=False)
        got = bps.pull(np.empty(50_000, np.int64), name, average=False)
        assert np.all(got == 2 * base + 1), (bps.rank(), base, got[0])


def pull_first(bps: Any) -> None:
    """All ranks pull before anybody has pushed, twice."""
    for _ in range(2):
        with pytest.raises(bps.DeadlineError, match="x"):
            bps.pull(np.empty(50_000, np.int64), "x", average=False, timeout=0.3)
    bps.barrier()
    check_rounds(bps, "x")


def one_pulls_first(bps: Any) -> None:
    """Rank 0 pulls before anybody has pushed; rank 1 is told so when it pushes."""
    array = np.ones(50_000, np.int64)
    if bps.rank() == 0:
        with pytest.raises(bps.DeadlineError, match="x"):
            bps.pull(array, "x", average=False, timeout=0.3)
    bps.barrier()
    if bps.rank() == 1:
        with pytest.raises(bps.DeadlineError, match="rank 0 gave up"):
            bps.push(array, "x", average=False)
    check_rounds(bps, "x")


def one_pushes_otherwise(bps: Any) -> None:
    """Rank 1 asks for another reduction: its push() raises, and so does what rank 0 waits for."""
    array = np.ones(50_000, np.int64)
    if bps.rank() == 0:
        bps.push(array, "x", average=False)
    bps.barrier()
    second = {"average": False} if bps.rank() == 0 else {"op": "max"}
    with pytest.raises(bps.MismatchError, match="different operations"):
        (bps.push if bps.rank() else bps.pull)(array, "x", **second)
    check_rounds(bps, "x")


def second_push_fails(bps: Any) -> None:
    """A round that was pushed before the one that failed is still there to be pulled."""
    array = np.full(50_000, 1 + bps.rank(), np.int64)
    bps.push(array, "x", average=False)
    if bps.rank() == 0:
        bps.push(array, "x", average=False)
    bps.barrier()
    if bps.rank() == 1:
        with pytest.raises(bps.MismatchError, match="different operations"):
            bps.push(array, "x", op="max")
    bps.barrier()
    assert np.all(bps.pull(np.empty_like(array), "x", average=False) == 3)
    if bps.rank() == 0:
        with pytest.raises(bps.MismatchError, match="different operations"):
            bps.pull(array, "x", average=False)
    check_rounds(bps, "x")


def sums_after_failures(bps: Any) -> None:
    """Operations of both halves skip such rounds, too."""
    array = np.ones(50_000, np.int64)
    for value in range(3):
        with pytest.raises(bps.DeadlineError, match="x"):
            bps.pull(array, "x", average=False, timeout=0.1)
        bps.barrier()
        assert np.all(bps.push_pull(np.full_like(array, value), "x", average=False) == 2 * value)
    check_rounds(bps, "x")


BODIES = [pull_first, one_pulls_first, one_pushes_otherwise, second_push_fails, sums_after_failures]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("servers", "transport"), JOBS)
def test_halves_go_on_together_after_one_failed(body, servers, transport):
    harness.run(body, workers=2, servers=servers, env={"BPS_TRANSPORT": transport})

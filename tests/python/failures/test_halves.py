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


@pytest.mark.parametrize("body", [pull_first, one_pulls_first, one_pushes_otherwise])
@pytest.mark.parametrize(("servers", "transport"), JOBS)
def test_halves_go_on_together_after_one_failed(body, servers, transport):
    harness.run(body, workers=2, servers=servers, env={"BPS_TRANSPORT": transport})

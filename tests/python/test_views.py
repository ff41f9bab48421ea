# SPDX-License-Identifier: Apache-2.0
"""Members are lost, and the job goes on with the others: one RoundAbortedError on each, then right sums."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import cluster
import numpy as np
import pytest
from rank_main import await_mark, mark

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(1.5 * cluster.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(5 * cluster.PATIENCE)}
COUNT = 300_000  # several partitions


def train(bps: Any, steps: int, last_size: int) -> dict[str, Any]:
    """Sums until the job has shrunk to `last_size` and `steps` more have been made; every sum is checked.

    The sum of a step holds one number per rank, so that a contribution too many or too few would show.
    """
    first_rank = bps.rank()
    sizes, errors, texts = [bps.size()], 0, []
    left = steps
    array = np.empty(COUNT, np.float32)
    while left > 0:
        array[:] = 1 + bps.rank()
        size = bps.size()
        try:
            for name in ("a", "b"):  # a step has several operations, and is repeated as a whole
                array[:] = 1 + bps.rank()
                bps.push_pull_inplace(array, name=name, average=False)
                assert array.min() == array.max() == size * (size + 1) / 2, (array.min(), array.max(), size)
        except bps.RoundAbortedError as error:
            kept = array.copy()
            errors += 1
            texts.append(str(error))
            time.sleep(0.05)
            assert (array == kept).all(), "the array was written to after the exception"
            assert bps.size() < size
            sizes.append(bps.size())
            continue
        if size == last_size:
            left -= 1
        else:
            mark("running")
    bps.barrier()
    return {"first_rank": first_rank, "rank": bps.rank(), "sizes": sizes, "errors": errors, "texts": texts}


def check(values: list[dict[str, Any]], sizes: list[int]) -> None:
    assert [value["rank"] for value in values] == list(range(len(values))), "ranks keep their order and close up"
    for value in values:
        assert value["sizes"] == sizes
        assert value["errors"] == len(sizes) - 1, "one exception for each view that has ended"


@pytest.mark.parametrize("servers", [None, 2])
def test_the_job_goes_on_without_a_killed_worker(transport, servers):
    env = FAST | cluster.over(transport) | {"BPS_MIN_WORKERS": "2"}
    with cluster.start(train, 20, 3, workers=4, servers=servers, env=env) as job:
        job.await_marks("running")
        job.kill("rank 2")
        values = [outcome.value for outcome in job.outcomes(but=[2]) if outcome.value]
    check(values, [4, 3])
    assert all("worker 2" in value["texts"][0] and "view 2" in value["texts"][0] for value in values)

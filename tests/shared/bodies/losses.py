# SPDX-License-Identifier: Apache-2.0
"""How soon a loss is noticed in tests, and how late at most; and ranks that go on until there is one."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import pytest

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}
SOON_S = 20 * harness.PATIENCE  # 2 s on a quiet machine; operations fail by their deadline after 100 s
SILENT = {"BPS_HEARTBEAT_TIMEOUT": str(60 * harness.PATIENCE)}  # a loss is noticed sooner than by silence


def sum_until_it_fails(bps: Any, arrays: Sequence[Any], marked_step: int, **how: Any) -> Exception:
    """Sums all of them at a time, again and again, and marks that it runs; returns the first error."""
    for step in itertools.count():
        handles = [bps.push_pull_async_inplace(one, name=f"t{i}", **how) for i, one in enumerate(arrays)]
        if step == marked_step:
            harness.mark("running")
        failures = []
        for handle in handles:
            try:
                handle.wait()
            except bps.BpsError as raised:
                failures.append(raised)
        if failures:
            return failures[0]
    raise AssertionError


def without_rank_1(bps: Any, call: Callable[[], object]) -> tuple[str, float]:
    """What this call raises while rank 1 is ended, and when."""
    harness.mark("ready")
    if bps.rank() == 1:
        harness.await_mark("never", timeout=60)
    with pytest.raises(bps.BpsError) as raised:
        call()
    came = time.monotonic()
    bps.shutdown()
    return f"{raised.type.__name__} {raised.value}", came


def check_the_others_are_told(body: Callable[..., tuple[str, float]]) -> None:
    """Ends rank 1 of three that are in without_rank_1()."""
    with harness.start(body, workers=3, env=SILENT) as job:
        job.await_marks("ready")
        killed = job.kill("rank 1")
        outcomes = job.outcomes(but=[1])
    for rank in (0, 2):
        assert outcomes[rank].value is not None, outcomes[rank].error
        text, came = outcomes[rank].value
        assert text.startswith("PeerLostError"), text
        assert "worker 1" in text
        assert came - killed < SOON_S

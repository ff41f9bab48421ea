# SPDX-License-Identifier: Apache-2.0
"""Sums do not depend on who came first."""

import time
from typing import Any

import harness
import numpy as np
import pytest

RUNS = 20


def hashes(bps: Any) -> list[bytes]:
    rank = bps.rank()
    values = np.random.default_rng(rank).standard_normal(300_000).astype(np.float32) * 10.0 ** (rank * 2 - 3)
    halves = values[:5000].astype(np.float16)
    jitter = np.random.default_rng(rank + 100)
    found = []
    for run in range(RUNS):
        time.sleep(jitter.random() * 0.01)
        whole = bps.push_pull(values, average=True, name="w")
        half = bps.push_pull(halves, average=False, name="h")
        found.append((whole.tobytes() + half.tobytes()) if run in (0, RUNS - 1) else b"")
        if run == 0:
            first = whole.tobytes() + half.tobytes()
        assert whole.tobytes() + half.tobytes() == first
    return [found[0], found[-1]]


@pytest.mark.parametrize("servers", [None, 2])
def test_bit_equal_whatever_the_order_of_arrival(transport, servers):
    found = harness.run(hashes, workers=4, servers=servers, env={"BPS_TRANSPORT": transport})
    assert len({part for rank in found for part in rank}) == 1

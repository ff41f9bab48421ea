# SPDX-License-Identifier: Apache-2.0
"""Weights that servers keep."""

import time
from typing import Any

import numpy as np
import pytest

from bps_rdma.errors import DeadlineError

COUNT = 20_000


def added(bps: Any, dtype: str) -> bytes:
    weights = np.full(COUNT, 100 if bps.rank() == 0 else -1, dtype)
    bps.store(weights, name="w")
    assert (weights == 100).all()
    delta = np.full(COUNT, bps.rank() + 1, dtype)
    before = 100
    for _ in range(50):
        now = bps.accumulate(delta, name="w")
        # Each partition is consistent, and all that this rank has added is in it.
        for begin in range(0, COUNT, 4096):
            part = now[begin : begin + 4096]
            assert part.min() >= before + bps.rank() + 1
        before = int(now.min())
    bps.barrier()
    final = bps.accumulate(np.zeros(COUNT, dtype), name="w")
    assert (final == 100 + 50 * sum(range(1, bps.size() + 1))).all()
    return final.tobytes()


def bounded(bps: Any) -> None:
    one = np.ones(COUNT, np.float32)
    bps.store(np.zeros(COUNT, np.float32), name="w")
    if bps.rank() == 0:
        for _ in range(2):
            bps.accumulate(one, name="w", staleness=2)
        handle = bps.accumulate_async(one, name="w", staleness=2)
        time.sleep(0.3)
        assert not bps.poll(handle)
        bps.barrier()
        assert handle.wait().min() >= 4  # three of its own, and one of the other
        with pytest.raises(DeadlineError, match=r"still waited for rank 1|still waits for rank 1"):
            bps.accumulate(one, name="w", staleness=2, timeout=0.4)
        bps.barrier()
    else:
        bps.barrier()
        bps.accumulate(one, name="w", staleness=2)
        bps.barrier()
        # What the other one has added stays, although its call has failed.
        assert (bps.accumulate(0 * one, name="w") == 5).all()
    bps.barrier()

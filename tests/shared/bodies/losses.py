# SPDX-License-Identifier: Apache-2.0
"""How soon a loss is noticed in tests, and how late at most; and ranks that go on until there is one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import harness

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}
SOON_S = 20 * harness.PATIENCE  # 2 s on a quiet machine; operations fail by their deadline after 100 s


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

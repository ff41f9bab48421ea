# SPDX-License-Identifier: Apache-2.0
"""Arrays that nobody may write to, and calls that may fail."""

from typing import Any

import numpy as np

COUNT = 1_000_000
# Long enough for whatever is still under way to arrive: a round of this size takes milliseconds.
QUIET_S = 0.5


def make(bps: Any, memory: str, count: int = COUNT) -> Any:
    return bps.empty(count) if memory == "mapped" else np.empty(count, np.float32)


def changed(array: Any, value: float) -> str:
    """What is wrong with an array that must hold `value` alone; "" if nothing is."""
    bad = np.flatnonzero(array != value)
    return f"{len(bad)} elements changed, the first one, {bad[0]}, to {array[bad[0]]}" if len(bad) else ""


def caught(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

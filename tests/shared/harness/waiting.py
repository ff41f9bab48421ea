# SPDX-License-Identifier: Apache-2.0
"""How tests wait: for a condition, never for a time."""

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

# On a machine that is busy with other things everything takes longer; a sanitizer build is slow by itself.
PATIENCE = float(os.environ.get("BPS_TEST_PATIENCE", "1"))
_STEP_S = 0.01

Value = TypeVar("Value")


class WaitedInVainError(AssertionError):
    """What a test waited for did not happen."""


def eventually(
    condition: Callable[[], Value],
    within: float = 60,
    what: str = "",
    hopeless: Callable[[], str] | None = None,
    until: Callable[[Value], Any] = bool,
) -> Value:
    """Asks for the condition until it is true, and returns that first true value.

    Args:
        condition: what is waited for; it is asked at least once.
        within: seconds of a quiet machine; PATIENCE scales them.
        what: says in the error what did not happen.
        until: whether a value of the condition is the one that is waited for, where its truth does not tell.
        hopeless: says why the condition cannot become true any more, which ends the waiting; "": it still can.

    Raises:
        WaitedInVainError: it did not become true; shows the last value.
    """
    end = time.monotonic() + within * PATIENCE
    while True:
        reason = (hopeless() if hopeless else "") or (
            "" if time.monotonic() < end else f"within {within * PATIENCE:g} s"
        )
        value = condition()  # asked once more after the end
        if until(value):
            return value
        if reason:
            raise WaitedInVainError(f"{what or 'what was waited for'} did not happen: {reason}; last value: {value!r}")
        time.sleep(_STEP_S)

# SPDX-License-Identifier: Apache-2.0
"""A rank that could learn of the end of its view from what the library keeps; see test_untold_views.py."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import await_mark, mark


def has_ended() -> bool:
    """Whether the view of this process has ended, without being told of it."""
    from bps_rdma import presence

    assert presence.inside is not None, "the end of the view has been told already"
    return bool(presence.inside.process.view_ended)


def next_call(bps: Any) -> None:
    assert bps.size() == 3, "nobody has told this rank yet"
    bps.push_pull(np.ones(5), name="step")


def go_on(bps: Any, begin: Callable[[Any], Any]) -> None:
    if bps.rank() == 1:
        await_mark("never")
    if bps.rank() == 0:
        pending = begin(bps)
        with pytest.raises(bps.RoundAbortedError):
            next_call(bps)
        with pytest.raises(bps.RoundAbortedError):
            pending.wait()
    else:
        mark("running")
        with pytest.raises(bps.RoundAbortedError):
            bps.push_pull(np.ones(5), name="step")
    total = bps.push_pull(np.full(5, 1.0 + bps.rank()), name="step", average=False)
    assert np.all(total == 3), "a sum of two views"
    assert bps.size() == 2

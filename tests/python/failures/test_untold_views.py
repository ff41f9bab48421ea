# SPDX-License-Identifier: Apache-2.0
"""Nobody learns of the end of a view but from an error that a call raises: what the library keeps tells nobody.

Otherwise the next call would belong to the next view, in the middle of a step of the view before.
"""

from typing import Any

import harness
import numpy as np
import pytest
from bodies.untold_views import go_on, has_ended
from bodies.views import FAST
from harness import eventually, mark

LARGE = 3000  # its messages are a notice and a broadcast


def message(bps: Any) -> Any:
    """The view ends between a message's notice and its broadcast."""
    from bps_rdma import _core

    begin = _core.start_message

    def late(process: Any, *where: Any) -> None:
        *notice, contents, priority, is_first, awaited, timeout, begun = where
        begin(process, *notice, (), priority, is_first, awaited, timeout, begun)
        mark("running")
        eventually(has_ended)
        for tensor, memory, root in contents:
            what = process, tensor, _core.Kind.broadcast, _core.ReduceOp.sum, memory, memory, None, True, True, root
            begun.append(_core.start_operation(*what, priority, awaited, timeout, False))

    _core.start_message = late
    sent = bps.send_async(np.ones(LARGE), dst=2)
    _core.start_message = begin
    return sent


def polled(bps: Any) -> Any:
    """The caller only asks whether a message has come."""
    handle = bps.recv_async(np.zeros(LARGE), src=1)
    mark("running")
    eventually(handle.done)
    return handle


def in_steps(bps: Any) -> Any:
    """A thread of the library goes on with the operation."""
    handle = bps.all_gather_async(np.ones(5), uneven=True)
    mark("running")
    eventually(handle.done)
    return handle


def counted(bps: Any) -> Any:
    """Another thread reads metrics."""
    from bps_rdma.prometheus import Collector

    handle = bps.push_pull_async(np.ones(5), name="alone")
    mark("running")
    eventually(has_ended)
    list(Collector().collect())
    return handle


def waited_for_with_others(bps: Any) -> Any:
    """A call that waits for several operations raises the first error: that of another one."""
    late = bps.push_pull_async(np.ones(5), name="late", timeout=0.1)
    handle, other = (bps.push_pull_async(np.ones(5), name=name) for name in ("alone", "other"))
    eventually(late.done)
    mark("running")
    eventually(has_ended)
    with pytest.raises(bps.DeadlineError):
        bps.wait([late, handle])
    return other


@pytest.mark.parametrize("begin", [message, polled, in_steps, counted, waited_for_with_others])
@pytest.mark.parametrize("servers", [None, 1])
def test_only_an_error_that_is_raised_ends_a_view(begin, servers):
    with harness.start(go_on, begin, workers=3, servers=servers, env=FAST | {"BPS_MIN_WORKERS": "2"}) as job:
        job.await_marks("running", [0, 2])
        job.kill("rank 1")
        job.values(but=[1])


def test_a_thread_that_tells_late_does_not_undo_a_later_view():
    """A thread stops between learning what to tell the caller and telling it; the others go on meanwhile."""
    from bps_rdma import presence
    from bps_rdma.presence import Presence, Stage

    before = presence.now()
    earlier, later = object(), object()
    try:
        presence.become(Stage.AHEAD, earlier)  # type: ignore[arg-type]
        presence.become(Stage.INSIDE, later)  # type: ignore[arg-type]
        presence.tell(earlier)  # type: ignore[arg-type]
        assert presence.now() == Presence(Stage.INSIDE, later)  # type: ignore[arg-type]
    finally:
        presence.become(*before)

# SPDX-License-Identifier: Apache-2.0
"""Shows to torch's profiler, and in BPS_TRACE, what the threads of a program do for its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.autograd import profiler

from bps_rdma.spans import Spans


@contextlib.contextmanager
def noted(spans: Spans, name: str) -> Iterator[None]:
    """Notes the time that the body takes, in the trace as `name` and in a profile as `bps: name`."""
    # A range costs several microseconds even where nothing is profiled.
    profiled = profiler.record_function(f"bps: {name}") if profiler._is_profiler_enabled else contextlib.nullcontext()
    with spans.around(name), profiled:
        yield

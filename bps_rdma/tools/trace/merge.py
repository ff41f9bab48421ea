# SPDX-License-Identifier: Apache-2.0
"""One file for all processes of a job."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from bps_rdma.tools.trace.clocks import align
from bps_rdma.tools.trace.files import Trace

_UNNAMED = re.compile(r"tensor (\d+)(?= \[|$)")


def merge(traces: Sequence[Trace]) -> dict[str, Any]:
    """A trace in the Trace Event Format, with one process for each of these and times that begin at zero.

    Servers do not know the names of tensors: they get them from the workers. "otherData" tells how well clocks agree.
    """
    alignments = align(traces)
    names = tensor_names(traces)
    times = [
        event["ts"] + alignment.shift
        for trace, alignment in zip(traces, alignments, strict=True)
        for event in trace.events
        if "ts" in event
    ]
    start = min(times, default=0.0)
    events = []
    for pid, (trace, alignment) in enumerate(zip(traces, alignments, strict=True), start=1):
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for event in trace.events:
            changed = event | {"pid": pid}
            if "ts" in event:
                changed["ts"] = round(event["ts"] + alignment.shift - start, 3)
                changed["name"] = named(event["name"], names)
            events.append(changed)
    clocks = [
        {
            "process": trace.about["process"],
            "host": trace.about["host"],
            "shift_us": round(alignment.shift, 3),
            "error_us": round(alignment.error, 3) if math.isfinite(alignment.error) else None,
        }
        for trace, alignment in zip(traces, alignments, strict=True)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def tensor_names(traces: Sequence[Trace]) -> dict[int, str]:
    """The workers' name of each tensor, by id."""
    spans = [span for trace in traces for span in (*trace.partitions, *trace.operations)]
    return {span.args["tensor"]: span.tensor for span in spans}


def named(text: str, names: dict[int, str]) -> str:
    """The name of an event of a server, with the name of its tensor."""
    return _UNNAMED.sub(lambda found: names.get(int(found[1]), found[0]), text)

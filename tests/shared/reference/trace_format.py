# SPDX-License-Identifier: Apache-2.0
"""Checks a trace against the "Trace Event Format" that Chrome's team has published, as far as it is used here.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: "JSON Object Format", "Metadata
Events", and "Async Events", whose nestable form has the phases b, n and e, and the identity (pid, category, id2.local).
"""

import json
from collections import defaultdict
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
}


def check(text: str) -> dict[str, Any]:
    """The trace. AssertionError: it is none, or its events do not nest."""
    trace = json.loads(text)
    assert isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    open_: dict[tuple[int, str, str], list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert isinstance(event["args"][field], kind), event
            named.add(event["pid"])
            continue
        assert event["ph"] in ("b", "e"), event
        assert isinstance(event["ts"], (int, float)), event
        assert event["cat"] in ("operation", "partition", "round", "program"), event
        assert event["pid"] in named, "an event of a process without a name"
        stack = open_[event["pid"], event["cat"], event["id2"]["local"]]
        if event["ph"] == "b":
            assert isinstance(event["args"], dict), event
            assert not stack or stack[-1]["ts"] <= event["ts"], event
            stack.append(event)
        else:
            begin = stack.pop()
            assert begin["name"] == event["name"], event
            assert begin["ts"] <= event["ts"], event
    assert not any(open_.values()), "an event does not end"
    return dict(trace)

# SPDX-License-Identifier: Apache-2.0
"""Computes where the time of each step went, and how much of the communication was hidden behind computation.

Only a program that says what it does, as the torch face does, has steps of its own. Communication is the time in which
some partition was under way; it is exposed while the program waits for gradients, and hidden at all other times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from bps_rdma.tools.trace.files import Span, Trace

WAIT = "wait for gradients"
PARTS = {"forward": "forward_ms", "backward": "backward_ms", WAIT: "wait_ms", "optimizer": "optimizer_ms"}

Interval = tuple[float, float]


def union(times: Iterable[Interval]) -> list[Interval]:
    """The same time, as intervals in order that do not touch."""
    found: list[Interval] = []
    for begin, end in sorted(times):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def covered(times: Iterable[Interval]) -> float:
    """The length of the union of these intervals."""
    return sum(end - begin for begin, end in union(times))


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """The time for which both go on; each is in order and does not touch itself."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def steps_of(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """The milliseconds of the parts of each step on the slowest worker, and the share that was hidden, in %."""
    slowest: dict[int, dict[str, Any]] = {}
    for trace in traces:
        for row in _steps_of(trace):
            known = slowest.get(row["step"])
            if known is None or row["took_ms"] > known["took_ms"]:
                slowest[row["step"]] = row
    return [slowest[step] for step in sorted(slowest)]


def hidden_percent(traces: Sequence[Trace]) -> float | None:
    """The share of the communication of all workers, in their steps, behind computation; None: no program says.

    What comes before the first step, such as the broadcast of parameters, hides behind nothing and is no part of one.
    """
    under_way = exposed = 0.0
    for trace in traces:
        busy = union(span.under_way for span in trace.partitions)
        for spans in _by_step(trace).values():
            here = _within(busy, spans)
            under_way += covered(here)
            exposed += common(here, _waits(spans))
    return _percent(exposed, under_way) if under_way else None


def _waits(spans: Iterable[Span]) -> list[Interval]:
    return union((span.begin, span.end) for span in spans if span.name == WAIT)


def _percent(exposed: float, under_way: float) -> float:
    return round(100 * (1 - exposed / under_way), 3)


def _by_step(trace: Trace) -> dict[int, list[Span]]:
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in trace.program:
        by_step[span.args["step"]].append(span)
    return by_step


def _within(busy: Sequence[Interval], spans: Sequence[Span]) -> list[Interval]:
    """The part of it from the first to the last of a step's spans."""
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    return [(max(begin, one[0]), min(end, one[1])) for one in busy if one[0] < end and one[1] > begin]


def _steps_of(trace: Trace) -> list[dict[str, Any]]:
    busy = union(span.under_way for span in trace.partitions)
    rows = []
    for step, spans in _by_step(trace).items():
        begin, end = min(span.begin for span in spans), max(span.end for span in spans)
        here = _within(busy, spans)
        under_way = covered(here)
        row: dict[str, Any] = {"step": step, "took_ms": _ms(end - begin)}
        for name, column in PARTS.items():
            row[column] = _ms(covered((span.begin, span.end) for span in spans if span.name == name))
        row["under_way_ms"] = _ms(under_way)
        row["hidden_percent"] = _percent(common(here, _waits(spans)), under_way) if under_way else None
        rows.append(row)
    return rows


def _ms(us: float) -> float:
    return round(us / 1e3, 6)

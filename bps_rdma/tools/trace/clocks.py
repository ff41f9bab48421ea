# SPDX-License-Identifier: Apache-2.0
"""Brings the clocks of several hosts together, by the pushes and answers that the traces have in common.

Processes of one host have one monotonic clock. Between two hosts, a push arrives after it was sent, and an answer after
the sum: with d = (clock of the server) - (clock of the worker), each partition of both traces says

    summed - landed  <=  d  <=  arrived - sent

The tightest of thousands of such bounds leave half of the shortest round trip as the error, and this needs no message
of its own. (The same idea as that of NTP: D. Mills, RFC 5905, section 8.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from bps_rdma.tools.trace.files import Key, Span, Trace


@dataclass(frozen=True)
class Alignment:
    """The microseconds to add to the times of a trace, and how wrong they may be."""

    shift: float
    error: float  # infinite: nothing connects it with the first trace


def align(traces: Sequence[Trace]) -> list[Alignment]:
    """Shifts of all traces to the clock of the first one."""
    clocks = [str(trace.about["clock"]) for trace in traces]
    bounds = _bounds(traces, clocks)
    known = {clocks[0]: Alignment(0, 0)}
    due = [clocks[0]]
    while due:
        here = due.pop(0)
        for (worker, server), (low, high) in bounds.items():
            if here not in (worker, server) or not math.isfinite(high - low):
                continue
            there = server if here == worker else worker
            if there in known:
                continue
            # A time of the server's clock minus d is one of the worker's.
            d = (low + high) / 2
            sign = -1 if here == worker else 1
            error = known[here].error + abs(high - low) / 2
            known[there] = Alignment(known[here].shift + sign * d, error)
            due.append(there)
    return [known.get(clock, Alignment(0, math.inf)) for clock in clocks]


def _bounds(traces: Sequence[Trace], clocks: Sequence[str]) -> dict[tuple[str, str], tuple[float, float]]:
    """The bounds of the difference of two clocks, by (clock of a worker, clock of a server)."""
    rounds: dict[str, dict[Key, tuple[str, Span]]] = defaultdict(dict)
    for trace, clock in zip(traces, clocks, strict=True):
        for span in trace.rounds:
            if not span.args["for_host"]:
                rounds[f"server {trace.about['server_rank']}"][span.key] = (clock, span)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for trace, clock in zip(traces, clocks, strict=True):
        for span in trace.partitions:
            server_clock, on_server = rounds[span.args["server"]].get(span.key, ("", None))
            if on_server is None or server_clock == clock or span.args["for_host"]:
                continue
            low, high = found.get((clock, server_clock), (-math.inf, math.inf))
            sent, landed = span.stages["sent"]
            low = max(low, on_server.stages["sum"][1] - landed)
            if (arrived := _arrival(on_server, trace.about["worker_rank"])) is not None:
                high = min(high, arrived - sent)
            found[clock, server_clock] = (low, high)
    return found


def _arrival(on_server: Span, rank: int) -> float | None:
    """When the push of that rank came; known of the first one and of the last one."""
    if rank == on_server.args["first_rank"]:
        return on_server.begin
    if rank == on_server.args["last_rank"]:
        return on_server.stages["waits for ranks"][1]
    return None

# SPDX-License-Identifier: Apache-2.0
"""Steps of a program in a trace: their parts, and what of the communication was hidden; against times made by hand."""

from pathlib import Path

import pytest

from bps_rdma.tools.trace import steps
from bps_rdma.tools.trace.files import Span, Trace


def trace(program: list[tuple[str, int, float, float]], partitions: list[tuple[float, float]]) -> Trace:
    """Times in milliseconds."""
    made = Trace(Path("x"), [], {})
    made.program = [Span(name, {"step": step}, 1e3 * begin, 1e3 * end) for name, step, begin, end in program]
    made.partitions = [Span("w [0]", {}, 1e3 * begin, 1e3 * end) for begin, end in partitions]
    return made


FAST = trace(
    [("forward", 0, 0, 10), ("backward", 0, 10, 30), ("wait for gradients", 0, 30, 34), ("optimizer", 0, 35, 40)],
    [(20, 28), (26, 34)],  # 14 ms, the last 4 while it waits
)
SLOW = trace(
    [
        ("forward", 0, 100, 120), ("backward", 0, 120, 150), ("wait for gradients", 0, 150, 170),
        ("forward", 1, 170, 190), ("wait for gradients", 1, 190, 200), ("gradient ready: x", 1, 189, 189),
    ],
    [(150, 170), (190, 195), (192, 200)],
)  # fmt: skip


def test_parts_of_the_slowest_worker():
    first, second = steps.steps_of([FAST, SLOW])
    assert first == {"step": 0, "took_ms": 70, "forward_ms": 20, "backward_ms": 30, "wait_ms": 20, "optimizer_ms": 0,
                     "under_way_ms": 20, "hidden_percent": 0}  # fmt: skip
    assert (second["took_ms"], second["under_way_ms"], second["hidden_percent"]) == (30, 10, 0)
    (row,) = steps.steps_of([FAST])
    assert (row["took_ms"], row["optimizer_ms"], row["under_way_ms"]) == (40, 5, 14)
    assert row["hidden_percent"] == pytest.approx(100 * 10 / 14, abs=1e-3)


def test_the_hidden_share_of_all():
    assert steps.hidden_percent([FAST]) == pytest.approx(100 * 10 / 14, abs=1e-3)
    assert steps.hidden_percent([FAST, SLOW]) == pytest.approx(100 * 10 / 44, abs=1e-3)
    assert steps.hidden_percent([trace([], [(0, 1)])]) is None
    assert steps.hidden_percent([trace([("forward", 0, 0, 1)], [])]) is None


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [([], [(0, 1)], 0), ([(0, 10)], [(2, 3), (5, 20)], 6), ([(0, 1), (2, 3)], [(1, 2)], 0), ([(0, 4)], [(0, 4)], 4)],
)
def test_time_in_common(one: list[steps.Interval], other: list[steps.Interval], wanted: float):
    assert steps.common(one, other) == steps.common(other, one) == wanted

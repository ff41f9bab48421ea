# SPDX-License-Identifier: Apache-2.0
"""What a trace costs: one job that starts anew in turns with BPS_TRACE and without, on this machine.

    python bench/trace_cost.py                      # 1 MiB between two ranks through shared memory
    python bench/trace_cost.py --transport tcp --pairs 100

The processes stay the same, because two jobs of the same program differ by more than a trace costs. The figure of a
turn is the median time of a push_pull on rank 0; that of a pair, how much longer it took with the trace, in %. Shown
are the median of the pairs with quartiles, how sure that median is (its 95 % interval, by resampling), and, as a
measure of the noise, the same between neighbouring turns that both have no trace. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANK = "BPS_TRACE_COST_RANK"
ORDER = (False, True, True, False)  # two pairs, and, from one four to the next, a pair without any trace


def turn(size: int, seconds: float, folder: str | None) -> float:
    """The median time of a round, in microseconds."""
    import numpy as np

    import bps_rdma as bps

    os.environ.pop("BPS_TRACE", None)
    if folder is not None:
        os.environ["BPS_TRACE"] = folder
    bps.init()
    array = bps.empty(size // 4)
    array[:] = 0
    stop = np.zeros(1, np.float32)
    times = []
    for _ in range(100):
        bps.push_pull_inplace(array, name="x")
    began = time.perf_counter()
    while True:
        for _ in range(100):
            before = time.perf_counter()
            bps.push_pull_inplace(array, name="x")
            times.append(time.perf_counter() - before)
        stop[0] = time.perf_counter() - began > seconds
        if float(bps.push_pull(stop, average=False, name="stop")[0]) > 0:
            break
    bps.shutdown()
    return statistics.median(times) * 1e6


def rank(size: int, seconds: float, pairs: int, folder: str) -> None:
    for number in range(2 * pairs):
        traced = ORDER[number % len(ORDER)]
        found = turn(size, seconds, f"{folder}/{number}" if traced else None)
        if os.environ["RANK"] == "0":
            print(f"turn {int(traced)} {found}", flush=True)


def interval(figures: list[float]) -> tuple[float, float]:
    """In which the median lies with 95 %."""
    draw = random.Random(1)  # noqa: S311
    medians = sorted(statistics.median(draw.choices(figures, k=len(figures))) for _ in range(2000))
    return medians[50], medians[-51]


def show(title: str, figures: list[float]) -> None:
    low, middle, high = statistics.quantiles(figures, n=4)
    least, most = interval(figures)
    print(f"{title}: {middle:+.2f} % (95 %: {least:+.2f} to {most:+.2f}; quartiles {low:+.1f} and {high:+.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--pairs", type=int, default=60, help="6 at least")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each turn")
    arguments = parser.parse_args()
    if RANK in os.environ:
        return rank(arguments.size, arguments.seconds, arguments.pairs, os.environ[RANK])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("bps")), "run", "-np", "2", __file__, *sys.argv[1:]],
            env=os.environ | {RANK: folder, "BPS_TRANSPORT": arguments.transport},
            capture_output=True,
            text=True,
            check=False,
        )
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    if done.returncode != 0 or written == 0:
        sys.exit(f"error: {done.stdout}{done.stderr}")
    turns = [line.partition("turn ")[2].split() for line in done.stdout.splitlines() if "turn " in line]
    figures = [float(found) for _, found in turns]
    pairs = [sorted(zip(turns[at : at + 2], figures[at : at + 2], strict=True)) for at in range(0, len(figures) - 1, 2)]
    dearer = [100 * (traced / plain - 1) for (_, plain), (_, traced) in pairs]
    neighbours = [100 * (figures[at + 1] / figures[at] - 1) for at in range(3, len(figures) - 1, 4)]
    plain = statistics.median(plain for (_, plain), _ in pairs)
    print(f"a round takes {plain:.1f} us without a trace; the traces are {written / 1e6:.1f} MB")
    show("a trace costs", dearer)
    show("between turns without one", neighbours)
    return None


if __name__ == "__main__":
    main()

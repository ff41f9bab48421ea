# SPDX-License-Identifier: Apache-2.0
"""What a trace costs: pairs of runs in turns, one with BPS_TRACE and one without, on this machine.

    python bench/trace_cost.py                      # 1 MiB between two ranks through shared memory
    python bench/trace_cost.py --transport tcp --pairs 12

Each run is a job of its own. The figure of a run is the median time of a push_pull on rank 0; that of a pair, how much
longer it took with the trace, in %. Needs a quiet machine: how much runs without a trace differ is printed beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANK = "BPS_TRACE_COST_RANK"


def rank(size: int, seconds: float) -> None:
    """One rank of a run: as many rounds as fit; rank 0 prints the median of one, in microseconds."""
    import numpy as np

    import bps_rdma as bps

    bps.init()
    array = bps.empty(size // 4)
    array[:] = 0
    stop = np.zeros(1, np.float32)
    times = []
    for _ in range(200):
        bps.push_pull_inplace(array, name="x")
    began = time.perf_counter()
    while True:
        for _ in range(200):
            before = time.perf_counter()
            bps.push_pull_inplace(array, name="x")
            times.append(time.perf_counter() - before)
        stop[0] = time.perf_counter() - began > seconds
        if float(bps.push_pull(stop, average=False, name="stop")[0]) > 0:
            break
    if bps.rank() == 0:
        print(f"median {statistics.median(times) * 1e6}", flush=True)
    bps.shutdown()


def run(arguments: argparse.Namespace, folder: Path | None) -> float:
    """The figure of one job, microseconds."""
    env = os.environ | {RANK: "1", "BPS_TRANSPORT": arguments.transport}
    env.pop("BPS_TRACE", None)
    if folder is not None:
        env["BPS_TRACE"] = str(folder)
    command = [
        str(Path(sys.executable).with_name("bps")),
        "run",
        "-np",
        "2",
        __file__,
        "--size",
        str(arguments.size),
        "--seconds",
        str(arguments.seconds),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    found = [line.split("median ")[1] for line in done.stdout.splitlines() if "median " in line]
    if done.returncode != 0 or len(found) != 1:
        sys.exit(f"error: {done.stdout}{done.stderr}")
    return float(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    arguments = parser.parse_args()
    if RANK in os.environ:
        return rank(arguments.size, arguments.seconds)
    off, dearer = [], []
    for pair in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as folder:
            order = [None, Path(folder)] if pair % 2 == 0 else [Path(folder), None]
            figures = {where is not None: run(arguments, where) for where in order}
        off.append(figures[False])
        dearer.append(100 * (figures[True] / figures[False] - 1))
        print(f"off {figures[False]:8.1f} us   on {figures[True]:8.1f} us   {dearer[-1]:+5.1f} %", flush=True)
    low, middle, high = statistics.quantiles(dearer, n=4)
    spread = 100 * (max(off) / min(off) - 1)
    print(
        f"a trace costs {middle:.1f} % (quartiles {low:.1f} and {high:.1f} %); runs without one: within {spread:.0f} %"
    )
    return None


if __name__ == "__main__":
    main()

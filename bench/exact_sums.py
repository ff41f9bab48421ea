# SPDX-License-Identifier: Apache-2.0
"""What exact sums cost beside plain ones: the same arrays, in turn, in one job.

    bps run -np 2 python bench/exact_sums.py [--rounds 30] [--json]
    BPS_TRANSPORT=tcp bps run -np 2 python bench/exact_sums.py

Shown are the medians over the rounds of the slowest rank, in ms, the ratio of each pair, its median and quartiles, and
how many elements did not fit a float64. Exact results are compared between ranks, and with the plain ones.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

import bps_rdma as bps

SIZES_KIB = (64, 1024, 8192, 65536)


def main() -> None:
    """Runs the benchmark on this rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="pairs per size")
    parser.add_argument("--json", action="store_true", help="one line of JSON per size")
    options = parser.parse_args()
    bps.init()
    for dtype in ("float32", "float16"):
        for size in SIZES_KIB:
            report(measure(dtype, size * 1024 // np.dtype(dtype).itemsize, options.rounds), options.json)
    bps.shutdown()


def measure(dtype: str, elements: int, rounds: int) -> dict[str, Any]:
    """Times plain and exact sums in turn."""
    gradient = (np.random.default_rng(bps.rank()).standard_normal(elements) * 1e-3).astype(dtype)
    arrays = {name: bps.empty(elements, dtype) for name in ("plain", "exact")}
    calls = {
        name: bps.prepare("push_pull", array, name=f"{name} {dtype} {elements}", exact=name == "exact")
        for name, array in arrays.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name in sorted(calls, reverse=bool(number % 2)):
            arrays[name][:] = gradient
            bps.push_pull_inplace(np.zeros(1), name="together")
            begin = time.perf_counter()
            calls[name]()
            if number >= 3:
                times[name].append(time.perf_counter() - begin)
    difference = np.abs(arrays["exact"].astype(np.float64) - arrays["plain"]).max()
    assert difference <= 4e-3 * np.abs(arrays["plain"]).max(), difference
    first = arrays["exact"].copy()
    bps.broadcast(first, name=f"same {dtype} {elements}")
    assert first.tobytes() == arrays["exact"].tobytes(), "ranks differ"

    slowest = {name: bps.push_pull(np.array(seconds), op="max", name="slowest") for name, seconds in times.items()}
    ratios = slowest["exact"] / slowest["plain"]
    total = bps.ExactSum(gradient)
    total.add(gradient)
    total.add(np.roll(gradient, 1))
    return {
        "dtype": dtype,
        "bytes": elements * gradient.itemsize,
        "ranks": bps.size(),
        "plain_ms": 1e3 * float(np.median(slowest["plain"])),
        "exact_ms": 1e3 * float(np.median(slowest["exact"])),
        "ratio": [float(one) for one in np.percentile(ratios, (25, 50, 75))],
        "repaired": len(total._sum.beyond()),
    }


def report(found: dict[str, Any], as_json: bool) -> None:
    """Prints what was measured, on rank 0."""
    if bps.rank() != 0:
        return
    if as_json:
        print(json.dumps(found), flush=True)
        return
    low, middle, high = found["ratio"]
    print(
        f"{found['dtype']:8} {found['bytes'] / 2**20:8.3f} MiB on {found['ranks']} ranks: plain "
        f"{found['plain_ms']:8.3f} ms, exact {found['exact_ms']:8.3f} ms, {middle:.2f} x ({low:.2f} to {high:.2f}), "
        f"{found['repaired']} repaired",
        flush=True,
    )


if __name__ == "__main__":
    main()

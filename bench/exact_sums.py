# SPDX-License-Identifier: Apache-2.0
"""What exact sums cost beside plain ones: the same arrays, in turn, in one job.

    bps run -np 2 python bench/exact_sums.py [--rounds 30] [--sizes 64,1024] [--json]
    BPS_TRANSPORT=tcp bps run -np 2 python bench/exact_sums.py

Shown are the medians over the rounds of the slowest rank, in ms, the ratio of each pair, its median and quartiles, and
how many elements did not fit a float64. Exact results are compared between ranks, and with the plain ones. "float64"
are numbers of float32, whose sums fit; "float64 long" have all bits. bfloat16 needs torch.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

import bps_rdma as bps

SIZES_KIB = "64,1024,8192,65536"
DTYPES = ("float32", "float16", "bfloat16", "float64", "float64 long")


def main() -> None:
    """Runs the benchmark on this rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="pairs per size")
    parser.add_argument("--sizes", default=SIZES_KIB, help="KiB of each rank")
    parser.add_argument("--json", action="store_true", help="one line of JSON per size")
    options = parser.parse_args()
    bps.init()
    for kind in DTYPES:
        for size in options.sizes.split(","):
            report(measure(kind, int(size) * 1024, options.rounds), options.json)
    bps.shutdown()


def array_of(kind: str, size: int) -> tuple[Any, Any]:
    """An array of `size` bytes in memory of bps, and gradients for it; for bfloat16, tensors of torch."""
    dtype = kind.split(maxsplit=1)[0]
    elements = size // (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
    gradient = np.random.default_rng(bps.rank()).standard_normal(elements) * 1e-3
    if kind == "float64":
        gradient = gradient.astype("float32")
    if dtype != "bfloat16":
        return bps.empty(elements, dtype), gradient.astype(dtype)
    import torch

    torch.set_num_threads(1)  # its threads would wait in a loop, on the processors that ranks need

    memory = torch.from_numpy(bps.empty(2 * elements, "uint8"))
    return memory.view(torch.bfloat16), torch.from_numpy(gradient).bfloat16()


def as_numbers(array: Any) -> np.ndarray[Any, Any]:
    """Its values in float64."""
    return (array if isinstance(array, np.ndarray) else array.double().numpy()).astype(np.float64)


def measure(kind: str, size: int, rounds: int) -> dict[str, Any]:
    """Times plain and exact sums in turn."""
    (plain, gradient), (exact, _) = array_of(kind, size), array_of(kind, size)
    arrays = {"plain": plain, "exact": exact}
    calls = {
        name: bps.prepare("push_pull", array, name=f"{name} {kind} {size}", exact=name == "exact")
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
    found = {name: as_numbers(array) for name, array in arrays.items()}
    difference = np.abs(found["exact"] - found["plain"]).max()
    assert difference <= (2e-2 if kind == "bfloat16" else 4e-3) * np.abs(found["plain"]).max(), difference
    first = found["exact"].copy()
    bps.broadcast(first, name=f"same {kind} {size}")
    assert first.tobytes() == found["exact"].tobytes(), "ranks differ"

    slowest = {name: bps.push_pull(np.array(seconds), op="max", name="slowest") for name, seconds in times.items()}
    ratios = slowest["exact"] / slowest["plain"]
    total = bps.ExactSum(gradient)
    total.add(gradient)
    total.add(gradient.roll(1) if kind == "bfloat16" else np.roll(gradient, 1))
    return {
        "dtype": kind,
        "bytes": size,
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
        f"{found['dtype']:12} {found['bytes'] / 2**20:8.3f} MiB on {found['ranks']} ranks: plain "
        f"{found['plain_ms']:8.3f} ms, exact {found['exact_ms']:8.3f} ms, {middle:.2f} x ({low:.2f} to {high:.2f}), "
        f"{found['repaired']} repaired",
        flush=True,
    )


if __name__ == "__main__":
    main()

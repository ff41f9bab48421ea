# SPDX-License-Identifier: Apache-2.0
"""Measures what a job costs besides its operations: declaring many tensors, and idling.

bps run -np 2 bench/set_up.py
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import numpy as np

import bps_rdma as bps

TENSORS = 4000
REPEATS = 5


def declare(prefix: str) -> float:
    tensors = {f"{prefix}.{i}": np.empty(16, np.float32) for i in range(TENSORS)}
    bps.barrier()
    begin = time.perf_counter()
    bps.declare_many(tensors)
    return time.perf_counter() - begin


def declare_large() -> float:
    large = np.empty(TENSORS * 512 * 1024, np.uint8)  # never touched, so it costs no memory
    bps.barrier()
    begin = time.perf_counter()
    bps.declare("large", large)
    return time.perf_counter() - begin


def idle(seconds: float) -> float:
    """Share of a core that this process uses while it is idle."""
    bps.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=float, default=10, help="for how many seconds the job idles")
    args = parser.parse_args()
    bps.init()
    bps.push_pull(np.ones(10), name="warm")
    many = [declare(f"round {i}") for i in range(REPEATS)]
    one = declare_large()
    used = idle(args.idle)
    print(
        f"rank {bps.rank()}: {TENSORS} tensors declared in {statistics.median(many) * 1e3:.1f} ms "
        f"({min(many) * 1e3:.1f} to {max(many) * 1e3:.1f}), one tensor of {TENSORS} partitions in {one * 1e3:.1f} ms; "
        f"idle: {used * 100:.2f} % of a core",
        flush=True,
    )
    bps.shutdown()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Shows whether the cost per partition stays constant from 10 to 100,000 partitions, and from 1 to 8 workers.

    .venv/bin/python bench/growth.py

Partitions have 64 bytes, so that only the cost per partition is measured. The processor time of all processes counts:
with fewer cores than workers, the elapsed time says little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

import numpy as np
from side_by_side import said_by_ranks

from bps_rdma.launch.environment import LocalJob

PIECE = 64
ROUNDS = 5


def used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank_main(partitions: int) -> None:
    import bps_rdma as bps

    bps.init()
    calls = max(1, 20_000 // partitions)
    array = bps.empty(partitions * PIECE // 4)
    warm = bps.empty(16)
    bps.push_pull_inplace(warm, "warm", average=False)
    bps.barrier()
    memory, begin = resident(), time.perf_counter()
    bps.declare("large", array)
    declared = time.perf_counter() - begin
    array.fill(1)
    bps.push_pull_inplace(array, "large", average=False)
    assert (array == bps.size()).all()
    memory = resident() - memory - array.nbytes
    cpu, wall = [], []
    for _ in range(ROUNDS):
        bps.barrier()
        before, begin = used(), time.perf_counter()
        for _ in range(calls):
            bps.push_pull_inplace(array, "large", average=False)
        wall.append((time.perf_counter() - begin) / calls / partitions)
        cpu.append((used() - before) / calls / partitions)
    print(json.dumps({"declare": declared / partitions, "memory": memory / partitions,
                      "cpu": statistics.median(cpu), "wall": statistics.median(wall)}), flush=True)  # fmt: skip
    bps.shutdown()


def measure(workers: int, partitions: int) -> dict[str, float]:
    """Means over the ranks."""
    job = LocalJob(workers=workers, transport="shm")
    pieces = {"BYTEPS_PARTITION_BYTES": str(PIECE), "BPS_MIN_PARTITION_BYTES": str(PIECE)}
    said = said_by_ranks(job, ["--as-rank", str(partitions)], **pieces)
    return {name: float(np.mean([one[name] for one in said])) for name in said[0]}


def show(label: str, found: dict[str, float]) -> None:
    declare, cpu, wall = (found[name] * 1e6 for name in ("declare", "cpu", "wall"))
    print(
        f"{label}: declare {declare:7.3f} us, push_pull {cpu:6.3f} us of processor time, {wall:6.3f} us of time, "
        f"memory {found['memory']:7.1f} bytes; each per partition and worker",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", default="10,100,1000,10000,100000", help="of a job of 2 workers")
    parser.add_argument("--workers", default="1,2,4,8", help="with 10,000 partitions")
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        rank_main(args.as_rank)
        return
    for partitions in map(int, args.partitions.split(",")):
        show(f"2 workers, {partitions:7,d} partitions", measure(2, partitions))
    for workers in map(int, args.workers.split(",")):
        show(f"{workers} workers,  10,000 partitions", measure(workers, 10_000))


if __name__ == "__main__":
    main()

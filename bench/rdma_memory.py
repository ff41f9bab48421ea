# SPDX-License-Identifier: Apache-2.0
"""What each value of BPS_RDMA_MEMORY costs: tensors that are used again, and tensors that are new in each call.

    ci/vm/run .venv/bin/python bench/rdma_memory.py          or, with a card: BPS_TEST_HCA=mlx5_0 python bench/...
    ... --sizes 64 1024 --rounds 30

One worker and one server for each of the three, in turn: median times, and the quartiles of their ratios to trusted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import numpy as np
import side_by_side
from side_by_side import quartiles, ratios

from bps_rdma.launch.environment import LocalJob

HCA = os.environ.get("BPS_TEST_HCA", "rxe0")
RULES = ("trusted", "watched", "staged")


def worker() -> None:
    """Answers each line, bytes and "again" or "new", with the seconds of one push_pull of each."""
    import bps_rdma as bps

    bps.init()
    print(json.dumps("ready"), flush=True)
    kept: dict[int, np.ndarray] = {}
    for line in sys.stdin:
        nbytes, which = json.loads(line)
        name = f"{nbytes} {which}"
        found = []
        for _ in range(max(3, (8 << 20) // nbytes)):
            array = (
                kept.setdefault(nbytes, np.ones(nbytes, np.uint8)) if which == "again" else np.ones(nbytes, np.uint8)
            )
            begin = time.perf_counter()
            bps.push_pull_inplace(array, average=False, name=name)
            found.append(time.perf_counter() - begin)
            assert array[0] == array[-1] == 1, "wrong result"
        print(json.dumps(statistics.median(found)), flush=True)
    bps.shutdown()


class Job(side_by_side.Job):
    """One worker and one server."""

    def __init__(self, rule: str) -> None:
        more = {"BPS_RDMA_HCA": f"={HCA}", "BPS_TIMEOUT": "60", "BPS_RDMA_MEMORY": rule}
        super().__init__(LocalJob(workers=1, servers=1, transport="rdma"), ["worker"], more)

    def push_pull(self, nbytes: int, which: str) -> float:
        return float(self.ask([nbytes, which])[0])


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1 << 10, 16 << 10], metavar="KIB")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    jobs = {rule: Job(rule) for rule in RULES}
    for nbytes in (size << 10 for size in asked.sizes):
        for which in ("again", "new"):
            found: dict[str, list[float]] = {rule: [] for rule in RULES}
            for _ in range(asked.rounds):
                for rule, job in jobs.items():
                    found[rule].append(job.push_pull(nbytes, which))
            for rule in RULES:
                print(
                    f"{nbytes >> 10} KiB, {which}, {rule}: {statistics.median(found[rule]) * 1e6:.0f} us; "
                    f"{quartiles(ratios(found[rule], found['trusted']))}",
                    flush=True,
                )
    for job in jobs.values():
        job.end()


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()

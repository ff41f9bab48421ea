# SPDX-License-Identifier: Apache-2.0
"""Measures what the start of a job with many ranks consists of.

    bps run -np 64 bench/start_up.py

Shows for each phase, from the start of the interpreter to the end of init(), when the last rank finished it, counted
from the start of the first process, and the processor time that all ranks together spent in it. The whole start cannot
take less than that processor time divided by the number of cores.
"""

import os
import time
from pathlib import Path

phases = [("interpreter", time.monotonic(), time.process_time())]

import numpy as np  # noqa: E402  the moments between the imports are what is measured

phases.append(("import numpy", time.monotonic(), time.process_time()))

import bps_rdma as bps  # noqa: E402

phases.append(("import bps_rdma", time.monotonic(), time.process_time()))


def started() -> float:
    """When the kernel made this process, on the clock of time.monotonic(), to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - since_boot


def main() -> None:
    bps.init()
    phases.append(("init()", time.monotonic(), time.process_time()))
    first = bps.all_gather(np.array([started()]), "started").min()
    found = np.array([[moment - first, used] for _, moment, used in phases])
    ranks = bps.all_gather(found.reshape(-1), "found").reshape(bps.size(), len(phases), 2)
    if bps.rank() == 0:
        spent = np.diff(ranks[:, :, 1], axis=1, prepend=0).sum(axis=0)
        for (name, *_), at, seconds in zip(phases, ranks[:, :, 0].max(axis=0), spent, strict=True):
            print(f"{name:16} over on the last rank after {at:5.2f} s; {seconds:6.2f} processor seconds of all ranks")
        cores = len(os.sched_getaffinity(0))
        print(f"{bps.size()} ranks on {cores} cores: at least {spent.sum() / cores:.2f} s of processor time per core")
    bps.shutdown()


if __name__ == "__main__":
    main()

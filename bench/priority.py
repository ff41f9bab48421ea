# SPDX-License-Identifier: Apache-2.0
"""Measures how long an urgent tensor takes that is issued after many less urgent ones.

    BYTEPS_SCHEDULING_CREDIT=4194304 bps run -np 2 bench/priority.py

Issues 256 MiB of tensors with low priority and then one of 1 MiB with high priority; all results are checked. Once the
last rank has issued it (all ranks are on one host), the urgent tensor should complete within the time that its own
partitions and one credit window take at the overall rate. What its server summed meanwhile is shown, too: it depends
less than times do on other work on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import bps_rdma as bps

TENSORS, NBYTES = 256, 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="2 at least, after two to warm up")
    rounds = parser.parse_args().rounds
    bps.init()
    size = bps.size()
    settings = {
        setting.name: int(setting.value or 0) for setting in bps.config() if setting.name.endswith(("BYTES", "CREDIT"))
    }
    partition, credit = settings["BPS_PARTITION_BYTES"], settings["BPS_SCHEDULING_CREDIT"]
    credit = credit * partition if credit < 1000 else credit
    low = [np.ones(NBYTES // 4, np.float32) for _ in range(TENSORS)]
    urgent = np.ones(NBYTES // 4, np.float32)
    bps.declare_many({f"low {i}": array for i, array in enumerate(low)} | {"urgent": urgent})
    waited, whole, summed = [], [], []
    for round_ in range(rounds + 2):
        for array in (*low, urgent):
            array.fill(1)
        bps.barrier()
        begin = time.perf_counter()
        handles = [
            bps.push_pull_async_inplace(array, f"low {i}", average=False, priority=-1) for i, array in enumerate(low)
        ]
        before = bps.metrics()["total"]["summed_bytes"]
        issued = time.perf_counter()
        bps.push_pull_inplace(urgent, "urgent", average=False, priority=1)
        back = time.perf_counter()
        meanwhile = bps.metrics()["total"]["summed_bytes"] - before
        behind = sum(not handle.done() for handle in handles)
        bps.wait(handles)
        everybody = bps.all_gather(np.array([issued, meanwhile]), "issued").reshape(size, 2)
        last, meanwhile = everybody[everybody[:, 0].argmax()]  # all ranks read the same clock
        if round_ >= 2:
            waited.append(back - last)
            whole.append(time.perf_counter() - begin)
            summed.append(meanwhile)
        assert all((array == size).all() for array in (*low, urgent))
        assert behind > 0 or credit == 0, "all tensors were complete already, so nothing was overtaken"
    rate = TENSORS * NBYTES / statistics.median(whole)
    allowed = (NBYTES + credit) / rate
    if bps.rank() == 0:
        low_q, middle, high_q = (q * 1e3 for q in statistics.quantiles(waited, n=4))
        print(
            f"urgent 1 MiB behind 256 MiB: {middle:.2f} ms ({low_q:.2f} to {high_q:.2f}); everything "
            f"{statistics.median(whole) * 1e3:.1f} ms; two partitions and a window of {credit} bytes at that rate: "
            f"{allowed * 1e3:.2f} ms; ratio {middle / 1e3 / allowed:.2f}; "
            f"its server summed {statistics.median(summed) / 2**20:.2f} MiB meanwhile, where the window "
            f"and the partition are {(credit + NBYTES) / size / 2**20:.2f}"
        )
    bps.shutdown()


if __name__ == "__main__":
    main()

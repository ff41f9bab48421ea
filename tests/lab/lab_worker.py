# SPDX-License-Identifier: Apache-2.0
"""A rank on a host of the lab: rounds of push_pull, of which every sum is checked. Writes a line of JSON per event.

lab_worker.py ROUNDS BYTES [READY | UNTIL_TOLD]
    READY: the rank ends after init()
    UNTIL_TOLD: all ranks end after the round in which one of them gets SIGUSR1
"""

import json
import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
from reference.values import pushed, summed

import bps_rdma as bps

ROUNDS_KEPT = 4  # rounds that follow each other differ
PERIOD = 65_521  # prime, so that no partition looks like another one; fresh memory is slow in these guests


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


def rounds(count: int, elements: int) -> Iterator[tuple[int, float, int]]:
    """(round, seconds, wrong elements)"""
    rank, size = bps.rank(), bps.size()
    ours = [pushed(PERIOD, "float32", rank, k) for k in range(ROUNDS_KEPT)]
    sums = [summed(PERIOD, "float32", range(size), k) for k in range(ROUNDS_KEPT)]
    array = np.empty(elements, np.float32)
    parts = [array[begin : begin + PERIOD] for begin in range(0, elements, PERIOD)]
    for k in range(count):
        for part in parts:
            part[...] = ours[k % ROUNDS_KEPT][: len(part)]
        bps.barrier()
        begin = time.monotonic()
        bps.push_pull_inplace(array, average=False, name="x")
        seconds = time.monotonic() - begin
        yield k, seconds, sum(int(np.count_nonzero(part != sums[k % ROUNDS_KEPT][: len(part)])) for part in parts)


def main() -> None:
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    begin = time.monotonic()
    try:
        bps.init()
        tell(event="ready", seconds=time.monotonic() - begin)
        if "READY" not in sys.argv:
            for k, seconds, wrong in rounds(int(sys.argv[1]), int(sys.argv[2]) // 4):
                tell(event="round", round=k, seconds=seconds, wrong=wrong)
                if "UNTIL_TOLD" in sys.argv and bps.push_pull(np.array([len(told)]), average=False, name="told")[0] > 0:
                    break
            counted = bps.metrics()["total"]
            shares = [member.get("share", 0) for member in bps.dump()["members"]]
            told = {name: counted[name] for name in ("partitions", "paths_lost")}
            tell(event="counted", shares=shares, **told)
        bps.shutdown()
    except bps.BpsError as error:
        tell(event="error", kind=type(error).__name__, text=str(error))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What operations count."""

from typing import Any

import numpy as np

PARTITION = 16_384
COUNT = 40_960  # float32: ten partitions


def measured(bps: Any, op: str, memory: str, rounds: int) -> dict[str, int]:
    array = bps.empty(COUNT) if memory == "empty" else np.zeros(COUNT, np.float32)
    part = array[slice(*bps.shard_bounds(COUNT, bps.size(), bps.rank()))]
    bps.barrier()
    before = bps.metrics()["total"]
    bps.barrier()  # nobody pushes before everybody has looked
    for _ in range(rounds):
        if op == "push_pull":
            bps.push_pull_inplace(array, name="x")
        elif op == "reduce_scatter":
            bps.reduce_scatter(array, name="x", out=part)
        else:
            bps.all_gather(part, name="x", out=array)
    bps.barrier()
    after = bps.metrics()["total"]
    return {name: after[name] - before[name] for name in after}

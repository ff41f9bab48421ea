# SPDX-License-Identifier: Apache-2.0
"""Compares torch's all_reduce on the backend bps with the same sums by bps_rdma directly.

    .venv/bin/python bench/torch_backend.py [--ranks 2] [--rounds 41] [--json FILE]

Rounds of both alternate on the same tensors, and ratios compare neighbouring rounds, so that other work on the machine
disturbs both. The time of a round is that of its slowest rank. Every result is verified.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from side_by_side import ratios, said_by_ranks, slowest

from bps_rdma.launch.environment import LocalJob
from bps_rdma.tools.bench.stats import quantile

SIZES = [1 << shift for shift in (16, 18, 20, 22, 24, 26)]
ROUND_BYTES = 64 << 20  # per round, with at most 64 calls


def rank_main(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    import bps_rdma
    import bps_rdma.torch

    dist.init_process_group("bps")
    world = dist.get_world_size()
    found = {}
    for size in SIZES:
        tensor = torch.from_numpy(bps_rdma.empty(size // 4))

        def native(tensor: torch.Tensor = tensor) -> None:
            bps_rdma.push_pull_inplace(tensor, average=False, name=f"native {tensor.numel()}")

        def by_torch(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        calls = max(1, min(64, ROUND_BYTES // size))
        for call in (native, by_torch):
            run(call, tensor, 2, world)
        times = {"native": [], "torch": []}
        for index in range(rounds):
            pair = [("native", native), ("torch", by_torch)]
            for name, call in pair if index % 2 else reversed(pair):
                times[name].append(run(call, tensor, calls, world))
        found[size] = times
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def run(call: Callable[[], None], tensor: object, calls: int, world: int) -> float:
    """Seconds per call."""
    import bps_rdma

    tensor.fill_(1)
    bps_rdma.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - begin) / calls
    expected = float(world) ** calls
    assert expected == float("inf") or bool((tensor == expected).all()), "a sum is wrong"
    return seconds


def measure(ranks: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds per call of the slowest rank, by size, method and round."""
    said = said_by_ranks(LocalJob(workers=ranks, transport="shm"), ["--rank-main", "--rounds", str(rounds)])
    return {int(size): slowest([one[size] for one in said]) for size in said[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_main:
        rank_main(options.rounds)
        return
    rows = []
    for size, times in measure(options.ranks, options.rounds).items():
        rate = ratios(times["native"], times["torch"])
        row = {
            "bytes": size,
            "native_us": statistics.median(times["native"]) * 1e6,
            "torch_us": statistics.median(times["torch"]) * 1e6,
            "rate": statistics.median(rate),
            "rate_lower": quantile(rate, 0.25),
            "rate_upper": quantile(rate, 0.75),
        }
        rows.append(row)
        print(
            "{bytes:>10,d} bytes: native {native_us:9.1f} us, torch {torch_us:9.1f} us: {rate:.3f} of the native rate "
            "({rate_lower:.3f} to {rate_upper:.3f})".format(**row)
        )
    if options.json:
        said = {"ranks": options.ranks, "rounds": options.rounds, "cores": os.cpu_count(), "sizes": rows}
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()

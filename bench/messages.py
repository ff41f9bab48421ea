# SPDX-License-Identifier: Apache-2.0
"""Compares send and recv, all_to_all, gather and scatter on the torch backend bps with gloo.

    .venv/bin/python bench/messages.py [--ranks 2] [--rounds 41] [--transport shm] [--json FILE]

Both groups have the same ranks, in the same processes. Rounds of both alternate on the same tensors, and ratios compare
neighbouring rounds, so that other work on the machine disturbs both. The time of a round is that of its slowest rank.
Every result is verified.

- ping-pong: rank 0 sends to rank 1 and gets as much back; the time is half of that.
- all_to_all: all_to_all_single, with so many bytes on each rank.
- gather, scatter: so many bytes of each rank, to or from rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from side_by_side import ratios, said_by_ranks, slowest

from bps_rdma.launch.environment import LocalJob
from bps_rdma.tools.bench.stats import quantile

SIZES = [1 << shift for shift in (3, 10, 16, 20, 24)]
ROUND_BYTES = 32 << 20  # per round, with at most 64 calls
KINDS = ("ping-pong", "all_to_all", "gather", "scatter")
LIBRARIES = ("bps", "gloo")


def rank_main(rounds: int) -> None:
    import torch.distributed as dist

    import bps_rdma.torch  # noqa: F401  registers the backend

    dist.init_process_group("bps")
    groups = {"bps": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = []
    for kind in KINDS:
        for size in SIZES:
            operation = Operation(kind, max(size // 8, dist.get_world_size() if kind == "all_to_all" else 1))
            calls = max(1, min(64, ROUND_BYTES // size))
            times: dict[str, list[float]] = {name: [] for name in LIBRARIES}
            for name in LIBRARIES:
                operation.run(groups[name], 2)
            for index in range(rounds):
                for name in LIBRARIES if index % 2 else reversed(LIBRARIES):
                    times[name].append(operation.run(groups[name], calls))
            found.append({"kind": kind, "bytes": size, "times": times})
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


class Operation:
    """One operation on tensors of so many int64."""

    def __init__(self, kind: str, elements: int) -> None:
        import torch
        import torch.distributed as dist

        self._kind = kind
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        elements -= elements % self._size if kind == "all_to_all" else 0
        self._own, self._got = torch.empty(elements, dtype=torch.int64), torch.empty(elements, dtype=torch.int64)
        self._parts = list(torch.empty(self._size, elements, dtype=torch.int64))

    def run(self, group: Any, calls: int) -> float:
        """Seconds per call."""
        import torch.distributed as dist

        self._own.fill_(self._rank)
        self._got.fill_(-1)
        for number, part in enumerate(self._parts):
            part.fill_(number if self._kind == "scatter" else -1)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            self._call(group)
        seconds = (time.perf_counter() - begin) / calls
        self._check()
        return seconds / 2 if self._kind == "ping-pong" else seconds

    def _call(self, group: Any) -> None:
        import torch.distributed as dist

        if self._kind == "all_to_all":
            dist.all_to_all_single(self._got, self._own, group=group)
        elif self._kind == "gather":
            dist.gather(self._own, self._parts if self._rank == 0 else None, dst=0, group=group)
        elif self._kind == "scatter":
            dist.scatter(self._got, self._parts if self._rank == 0 else None, src=0, group=group)
        elif self._rank == 0:
            dist.send(self._own, 1, group=group)
            dist.recv(self._got, 1, group=group)
        elif self._rank == 1:
            dist.recv(self._got, 0, group=group)
            dist.send(self._own, 0, group=group)

    def _check(self) -> None:
        if self._kind == "all_to_all":
            assert all(bool((one == rank).all()) for rank, one in enumerate(self._got.chunk(self._size)))
        elif self._kind == "gather":
            assert self._rank or all(bool((part == rank).all()) for rank, part in enumerate(self._parts))
        elif self._kind == "scatter":
            assert bool((self._got == self._rank).all())
        elif self._rank < 2:
            assert bool((self._got == 1 - self._rank).all())


def measure(ranks: int, rounds: int, transport: str) -> list[dict[str, Any]]:
    """Seconds per call of the slowest rank, by kind, size, library and round."""
    said = said_by_ranks(LocalJob(workers=ranks, transport=transport), ["--rank-main", "--rounds", str(rounds)])
    return [each[0] | {"times": slowest([one["times"] for one in each])} for each in zip(*said, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_main:
        rank_main(options.rounds)
        return
    rows = []
    for found in measure(options.ranks, options.rounds, options.transport):
        times = found["times"]
        rate = ratios(times["gloo"], times["bps"])
        row = {
            "kind": found["kind"],
            "bytes": found["bytes"],
            "bps_us": statistics.median(times["bps"]) * 1e6,
            "gloo_us": statistics.median(times["gloo"]) * 1e6,
            "ratio": statistics.median(rate),
            "lower": quantile(rate, 0.25),
            "upper": quantile(rate, 0.75),
        }
        rows.append(row)
        print(
            "{kind:>10} {bytes:>10,d} bytes: bps {bps_us:8.1f} us, gloo {gloo_us:8.1f} us: {ratio:.2f} times as fast "
            "({lower:.2f} to {upper:.2f})".format(**row)
        )
    if options.json:
        said = {"ranks": options.ranks, "rounds": options.rounds, "transport": options.transport}
        options.json.write_text(json.dumps(said | {"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

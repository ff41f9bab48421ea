# SPDX-License-Identifier: Apache-2.0
"""Measures how much faster the torch backend could be, at the most, if it were a c10d::Backend written in C++.

    .venv/bin/python bench/cpp_backend.py [--rounds 41] [--json FILE]

It compiles a C++ backend whose all_reduce does nothing, against the installed torch; that takes a minute at first. A
whole one in C++ would cost as much for torch's dispatcher, and at least what a prepared operation costs for the sum.
Rounds of that pair and of all_reduce on the backend bps alternate on the same tensors. The time of a round is that of
its slowest rank. The sums of both are verified.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from side_by_side import quartiles, ratios, said_by_ranks, slowest
from torch_backend import run

from bps_rdma.launch.environment import LocalJob

SIZES = [1 << shift for shift in (10, 14, 16, 18, 20)]
CALLS = 64  # per round

NOTHING = """
#include <torch/csrc/distributed/c10d/Backend.hpp>

struct Done : c10d::Work {
  Done() { finish(); }
  bool wait(std::chrono::milliseconds) override { return true; }
};

struct Nothing : c10d::Backend {
  using c10d::Backend::Backend;
  const std::string getBackendName() const override { return "nothing"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<Done>();
  }
};

c10::intrusive_ptr<c10d::Backend> nothing(int rank, int size) { return c10::make_intrusive<Nothing>(rank, size); }
"""


def register_nothing() -> None:
    """Compiles and registers the backend "nothing"."""
    import torch.distributed as dist
    from torch.utils.cpp_extension import load_inline

    made = load_inline("bps_bench_nothing", NOTHING, functions="nothing", with_pytorch_error_handling=False)
    dist.Backend.register_backend(
        "nothing", lambda _store, rank, size, _timeout: made.nothing(rank, size), devices=["cpu"]
    )


def rank_main(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    import bps_rdma
    import bps_rdma.torch

    register_nothing()
    dist.init_process_group("bps")
    nothing: Any = dist.new_group(backend="nothing")
    found = {}
    for size in SIZES:
        tensor = torch.from_numpy(bps_rdma.empty(size // 4))
        prepared = bps_rdma.prepare("push_pull", tensor, average=False, name=f"prepared {size}")

        def in_cpp(tensor: torch.Tensor = tensor, prepared: Any = prepared) -> None:
            prepared()
            dist.all_reduce(tensor, group=nothing)

        def by_bps(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        times: dict[str, list[float]] = {"c++": [], "bps": []}
        pair = [("c++", in_cpp), ("bps", by_bps)]
        for _, call in pair:
            run(call, tensor, 2, 2)
        for index in range(rounds):
            for name, call in pair if index % 2 else reversed(pair):
                times[name].append(run(call, tensor, CALLS, 2))
        found[size] = times
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_main:
        rank_main(options.rounds)
        return
    register_nothing()  # before two ranks want to compile it
    said = said_by_ranks(LocalJob(workers=2, transport="shm"), ["--rank-main", "--rounds", str(options.rounds)])
    found = {int(size): slowest([one[size] for one in said]) for size in said[0]}
    for size, times in found.items():
        bound, ours = (statistics.median(times[name]) * 1e6 for name in ("c++", "bps"))
        gain = quartiles(ratios(times["bps"], times["c++"]))
        print(f"{size:>9,d} bytes: bps {ours:7.1f} us, in C++ at least {bound:7.1f} us: at most {gain} times as fast")
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

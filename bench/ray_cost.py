# SPDX-License-Identifier: Apache-2.0
"""What Ray costs beside torchrun: one function, started by each in turn, on this machine.

    python bench/ray_cost.py [--pairs 9] [--ranks 2] [--elements 1000000]

Start-up is the time until all ranks have taken their first step. Ray's cluster runs already; torchrun needs none. A
step is one push_pull; its processor time, of all threads of a rank, depends less on what else the machine does. Medians
over the pairs, and the ratio within a pair as median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_WARM_UP = 20


def train(plan: dict[str, Any]) -> dict[str, float]:
    """As one rank: when its first step was over; of the others the median seconds, and the mean processor seconds."""
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    x = np.ones(plan["elements"], np.float32)
    times: list[float] = []
    first = 0.0
    for number in range(_WARM_UP + plan["steps"]):
        if number == _WARM_UP:
            used = processor_seconds()
        begun = time.perf_counter()
        bps_rdma.push_pull_inplace(x, name="x")
        times.append(time.perf_counter() - begun)
        first = first or time.time()
    used = (processor_seconds() - used) / plan["steps"]
    bps_rdma.shutdown()
    return {"first": first, "step": statistics.median(times[_WARM_UP:]), "processor": used}


def processor_seconds() -> float:
    """Of this process until now."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def by_ray(plan: dict[str, Any]) -> list[dict[str, float]]:
    """The ranks' results, as actors."""
    import bps_rdma.ray

    return bps_rdma.ray.run(train, plan, per_host=plan["ranks"], rank_resources={"CPU": 0.5})


def by_torchrun(plan: dict[str, Any]) -> list[dict[str, float]]:
    """The ranks' results, as torchrun's processes."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launcher, str(plan["ranks"]), __file__, "--as-rank", json.dumps(plan | {"folder": folder})]
        subprocess.run(command, check=True, cwd=folder)
        return [json.loads(path.read_text()) for path in Path(folder).glob("rank-*")]


def measure(plan: dict[str, Any], pairs: int) -> None:
    """Prints the table."""
    import ray

    ray.init(num_cpus=plan["ranks"], include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    found: dict[str, list[tuple[float, ...]]] = {"ray": [], "torchrun": []}
    for number in range(pairs + 1):  # the first pair fills caches
        both = [("ray", by_ray), ("torchrun", by_torchrun)]
        for name, start in both if number % 2 else reversed(both):
            begun = time.time()
            ranks = start(plan)
            if number:
                startup = max(rank["first"] for rank in ranks) - begun
                steps = (statistics.median(rank[what] for rank in ranks) for what in ("step", "processor"))
                found[name].append((startup, *steps))
    print("| | Ray | torchrun | ratio (quartiles) |\n|---|---|---|---|")
    rows = [("start-up", 1.0, "s"), ("step", 1e6, "us"), ("its processor time", 1e6, "us")]
    for index, (what, scale, unit) in enumerate(rows):
        ray_s, torchrun_s = ([times[index] for times in found[name]] for name in ("ray", "torchrun"))
        ratios = [a / b for a, b in zip(ray_s, torchrun_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        shown = [f"{statistics.median(times) * scale:.3g} {unit}" for times in (ray_s, torchrun_s)]
        print(f"| {what} | {' | '.join(shown)} | {middle:.2f} ({low:.2f} to {high:.2f}) |")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, default=1_000_000, help="of float32, in one step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        result = json.dumps(train(options.as_rank))
        (Path(options.as_rank["folder"]) / f"rank-{os.environ['RANK']}").write_text(result)
        return
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "120",
        "OMP_NUM_THREADS": "1",
    }
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # Ray's workers import this module
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:
        os.environ["RAY_TMPDIR"] = folder
        os.chdir(folder)
        measure({"ranks": options.ranks, "elements": options.elements, "steps": options.steps}, options.pairs)


if __name__ == "__main__":
    main()

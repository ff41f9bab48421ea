# SPDX-License-Identifier: Apache-2.0
"""What a training step takes over slow links with compressed gradients, beside gloo with torch's own hooks.

    sudo .venv/bin/python bench/compressed_steps.py --rate 100,1000 --plot docs/compression.png

Two hosts (network namespaces, as in link_lab.py) with one rank each train a model of 4.2 million parameters in float32.
Every way of sending has a replica of its own; steps of all of them take turns, so that what else happens on the machine
meets all alike. Shown are medians of the slowest rank, their quartiles, and the bytes on a link per step. The gradients
of the dense methods are compared with the exact mean, and those of all methods between the ranks.

Needs root for the namespaces. The processor works for both hosts, so that at high rates it, and not the link, limits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import link_lab

from bps_rdma import BFloat16, Int4, Int8, MxFp8, OneBit, TopK
from bps_rdma.launch.process import Children

OURS: dict[str, Any] = {
    "bps, float32": None,
    "bps, bf16": BFloat16(),
    "bps, mxfp8": MxFp8(),
    "bps, int8": Int8(),
    "bps, int4 + feedback": Int4(feedback=True),
    "bps, topk 1 % + feedback": TopK(feedback=True),
    "bps, onebit + feedback": OneBit(feedback=True),
}
GLOO = ("gloo, float32", "gloo, torch's fp16 hook", "gloo, torch's PowerSGD rank 4")
# The largest error of a mean, as a share of the largest element.
ERRORS = {
    "gloo, float32": 1e-5,
    "gloo, torch's fp16 hook": 5e-3,
    "bps, float32": 1e-5,
    "bps, bf16": 2e-2,
    "bps, mxfp8": 2e-1,
    "bps, int8": 3e-2,
}
WIDTH = 1024


def rank_main(rounds: int) -> None:
    """One rank: runs the steps, and prints a line of JSON for each round."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    import bps_rdma as bps
    from bps_rdma.torch import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bps.init()
    rank, size = bps.rank(), bps.size()

    def model() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def batch(step: int, of_rank: int) -> Any:
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + of_rank))

    replicas: dict[str, Any] = {}
    for name in GLOO:
        # Over gloo PowerSGD's reductions of several buckets would be started in different orders by the ranks.
        cap = 1000 if name == GLOO[2] else None
        replicas[name] = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True, bucket_cap_mb=cap)
    replicas[GLOO[1]].register_comm_hook(None, default_hooks.fp16_compress_hook)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    replicas[GLOO[2]].register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for name, method in OURS.items():
        how = method or None
        replicas[name] = DistributedDataParallel(model(), compression=how)
    names = list(replicas)
    interface = Path("/sys/class/net/eth0/statistics/tx_bytes")
    for step in range(-3, rounds):  # the first ones are not counted: PowerSGD begins with its third step
        for offset in range(len(names)):
            name = names[(step + offset) % len(names)]
            replica = replicas[name]
            replica.zero_grad()
            dist.barrier()
            sent, begin = int(interface.read_text()), time.perf_counter()
            replica(batch(step + 10, rank)).square().mean().backward()
            seconds = time.perf_counter() - begin
            dist.barrier()
            sent = int(interface.read_text()) - sent
            gradient = torch.cat([one.grad.flatten() for one in replica.parameters()])
            digest = hashlib.sha256(gradient.numpy().tobytes()).hexdigest()
            error = None
            if name in ERRORS:
                exact = model()
                for one in range(size):
                    (exact(batch(step + 10, one)).square().mean() / size).backward()
                wanted = torch.cat([one.grad.flatten() for one in exact.parameters()])
                error = float((gradient - wanted).abs().max() / wanted.abs().max())
                if error > ERRORS[name]:
                    raise SystemExit(f"{name}: the mean is wrong by {error:.3g} of the largest element")
            row = {"name": name, "step": step, "seconds": seconds, "bytes": sent, "digest": digest, "error": error}
            print(json.dumps(row), flush=True)
    bps.shutdown()
    dist.destroy_process_group()


def measure(rate: float, rounds: int, folder: Path) -> dict[str, dict[str, Any]]:
    """All ways over links of this rate, in Mbit/s."""
    outputs = [folder / f"rank-{rank}-{rate:g}.txt" for rank in range(2)]
    with link_lab.lab([rate] * 2, 1, [], 0) as (_, job), Children() as children:
        for rank, output in enumerate(outputs):
            words = [sys.executable, __file__, "--rank", str(rounds)]
            shell = ["/bin/sh", "-c", f'exec "$@" > {output}', "sh", *words]
            children.spawn(f"rank {rank}", job.placed(f"rank {rank}", shell), job.worker(rank))
        while children.running:
            for child in children.wait():
                if child.status != 0:
                    raise SystemExit(child.describe_end())
    ranks = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    found: dict[str, dict[str, Any]] = {}
    for pair in zip(*ranks, strict=True):
        if len({one["digest"] for one in pair}) != 1:
            raise SystemExit(f"{pair[0]['name']}: the ranks have different gradients")
        if pair[0]["step"] < 0:
            continue
        one = found.setdefault(pair[0]["name"], {"seconds": [], "bytes": [], "errors": []})
        one["seconds"].append(max(each["seconds"] for each in pair))
        one["bytes"].append(max(each["bytes"] for each in pair))
        if pair[0]["error"] is not None:
            one["errors"].append(pair[0]["error"])
    return found


def report(rate: float, found: dict[str, dict[str, Any]]) -> None:
    base = statistics.median(found["bps, bf16"]["seconds"])
    print(f"\n{rate:g} Mbit/s; times in ms, median and quartiles; speed beside bf16; MB sent by a host; error")
    for name, one in found.items():
        low, middle, high = statistics.quantiles(one["seconds"], n=4)
        error = f"{max(one['errors']):.1e}" if one["errors"] else "-"
        sent = statistics.median(one["bytes"]) / 1e6
        print(
            f"{name:32} {1e3 * middle:8.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})  {base / middle:5.2f}  "
            f"{sent:6.2f}  {error}"
        )


def plot(path: Path, results: dict[float, dict[str, dict[str, Any]]]) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(results), figsize=(3 + 4.2 * len(results), 4.4), layout="constrained", squeeze=False
    )
    for number, (rate, found) in enumerate(results.items()):
        axes = panels[0][number]
        names = list(found)[::-1]
        quartiles = [statistics.quantiles([1e3 * one for one in found[name]["seconds"]], n=4) for name in names]
        middle = [one[1] for one in quartiles]
        spread = [[one[1] - one[0] for one in quartiles], [one[2] - one[1] for one in quartiles]]
        colours = ["tab:blue" if name.startswith("bps") else "tab:gray" for name in names]
        axes.barh(names if number == 0 else range(len(names)), middle, xerr=spread, color=colours, capsize=2)
        if number > 0:
            axes.set_yticks([])
        axes.set_xlabel("ms per step")
        axes.set_title(f"{rate:g} Mbit/s", fontsize="medium")
    figure.suptitle("A step of 4.2 million parameters, two hosts with one rank each", fontsize="medium")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100,1000", help="of the links, Mbit/s; several: 100,1000")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args.rank)
    if os.geteuid() != 0:
        sys.exit("error: creating network namespaces needs root\nhint: use sudo, or a container with CAP_SYS_ADMIN")
    import tempfile

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for rate in (float(one) for one in args.rate.split(",")):
            results[rate] = measure(rate, args.rounds, Path(folder))
            report(rate, results[rate])
    if args.json:
        args.json.write_text(json.dumps(results) + "\n")
    if args.plot:
        plot(args.plot, results)
    return None


if __name__ == "__main__":
    main()

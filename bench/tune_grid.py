# SPDX-License-Identifier: Apache-2.0
"""Compares what `bps tune` recommends with the best of a grid of partitions and buckets that is measured afterwards.

    python bench/tune_grid.py                                  # two ranks, shm and tcp
    python bench/tune_grid.py --transport tcp --gradients 64M --cycles 5
    sudo .venv/bin/python bench/tune_grid.py --link 1000   # two hosts with links of 1,000 Mbit/s, as in link_lab.py

The grid has each size of partitions that `bps tune` tries, the default among them, with buckets from 256 KiB to all of
the gradients. What is compared is the time of a step: a backward pass, and what shows of sending its gradients. All
points take turns, forwards and backwards. The shortest of many times is short by chance as well: so the recommendation
and the best points of the grid are measured anew, and only that is compared. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import link_lab

from bps_rdma.launch.process import Children

RANK = "BPS_TUNE_GRID"
BPS = str(Path(sys.executable).with_name("bps"))
PARTITIONS = (None, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
BUCKETS = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)


def rank(nbytes: int, backward_s: float, cycles: int, points: list[tuple[int | None, int]]) -> None:
    """One rank: the median time of a step at each point; rank 0 prints them."""
    import bps_rdma as bps
    from bps_rdma.tools.tune import measure

    times: dict[tuple[int | None, int], list[float]] = {point: [] for point in points}
    partitions = sorted({partition for partition, _ in points}, key=lambda size: size or 0)
    shows = False
    for cycle in range(cycles):
        for partition in partitions if cycle % 2 == 0 else partitions[::-1]:
            measure._join(partition)
            shows = bps.rank() == 0
            here = [point for point in points if point[0] == partition]
            for point in here if cycle % 2 == 0 else here[::-1]:
                times[point] += measure._rounds(measure._Step(nbytes, point[1], backward_s), 0.2)
            bps.shutdown()
    if shows:
        steps = [
            [partition, bucket, backward_s + statistics.median(found)] for (partition, bucket), found in times.items()
        ]
        print("grid " + json.dumps(steps), flush=True)


def run(command: list[str], arguments: argparse.Namespace, transport: str, spec: str = "") -> str:
    """What the ranks of a job of this command print."""
    env = {RANK: spec} if spec else {}
    if arguments.link is not None:
        return run_on_hosts(command, arguments, env)
    done = subprocess.run(
        [BPS, "run", "-np", str(arguments.nproc), *command],
        env=os.environ | {"BPS_TRANSPORT": transport} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"error: {command}:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_on_hosts(command: list[str], arguments: argparse.Namespace, env: dict[str, str]) -> str:
    """The same with each rank on a host of its own."""
    hosts = link_lab.lab([arguments.link] * arguments.nproc, 1, [], 0)
    with tempfile.TemporaryDirectory() as folder, hosts as (_, job), Children() as children:
        for rank in range(arguments.nproc):
            shell = ["/bin/sh", "-c", f'exec "$@" > {folder}/{rank}', "sh", *command]
            children.spawn(f"rank {rank}", job.placed(f"rank {rank}", shell), job.worker(rank) | env)
        while children.running:
            for child in children.wait():
                if child.status != 0:
                    sys.exit(f"error: {command}: {child.describe_end()}")
        return Path(folder, "0").read_text()


def measure(
    points: set[tuple[int | None, int]],
    found: dict[str, Any],
    cycles: int,
    arguments: argparse.Namespace,
    transport: str,
) -> dict[tuple[int | None, int], float]:
    spec = json.dumps([found["nbytes"], found["backward_s"], cycles, sorted(points, key=str)])
    text = run([sys.executable, __file__], arguments, transport, spec)
    line = next(line for line in text.splitlines() if "grid [" in line)
    return {(partition, bucket): seconds for partition, bucket, seconds in json.loads(line.partition("grid ")[2])}


def compare(arguments: argparse.Namespace, transport: str) -> None:
    told = run([BPS, "tune", "--gradients", arguments.gradients, "--json"], arguments, transport)
    found: dict[str, Any] = json.loads(told[told.index("{") :])
    nbytes, backward_s = found["nbytes"], found["backward_s"]
    wanted = (found["partition"], found["bucket"])
    points = {(partition, min(bucket, nbytes)) for partition in PARTITIONS for bucket in BUCKETS} | {wanted}
    grid = measure(points, found, arguments.cycles, arguments, transport)
    first = sorted(grid, key=lambda point: grid[point])[:3]
    steps = measure({*first, wanted}, found, 4 * arguments.cycles, arguments, transport)
    best = min(steps, key=lambda point: steps[point])
    where = transport if arguments.link is None else f"links of {arguments.link:g} Mbit/s"
    for point in sorted(steps, key=lambda point: steps[point]):
        print(f"  partitions {point[0] or 'default'}, buckets {point[1]}: {steps[point] * 1e3:.2f} ms")
    print(
        f"{where}: backward {backward_s * 1e3:.1f} ms; recommended {wanted}: {steps[wanted] * 1e3:.2f} ms, "
        f"by the model {found['step']['predicted_s'] * 1e3:.2f} ms; best of {len(grid)} points {best}: "
        f"{steps[best] * 1e3:.2f} ms; the recommendation takes {steps[wanted] / steps[best] - 1:+.1%}",
        flush=True,
    )


def main() -> None:
    if RANK in os.environ:
        nbytes, backward_s, cycles, points = json.loads(os.environ[RANK])
        return rank(nbytes, backward_s, cycles, [(partition, bucket) for partition, bucket in points])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=("shm", "tcp", "rdma"))
    parser.add_argument("--link", type=float, help="each rank on a host of its own, whose link has this rate, Mbit/s")
    parser.add_argument("--gradients", default="64M")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=4)
    arguments = parser.parse_args()
    for transport in arguments.transport or (["shm", "tcp"] if arguments.link is None else ["tcp"]):
        compare(arguments, transport)
    return None


if __name__ == "__main__":
    main()

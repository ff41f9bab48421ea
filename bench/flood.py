# SPDX-License-Identifier: Apache-2.0
"""What connections of unauthenticated peers cost a job that trains over TCP.

bps run -np 2 --transport tcp bench/flood.py

A process beside the job opens RATE connections a second: to a closed port, which shows what making them costs this
machine, and to the scheduler, which lives in rank 0. It closes them at once, or keeps them open and silent. Each flood
has a quiet phase just before it, and the share of that phase's speed that the job keeps is what counts: median and
quartiles over the pairs.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import bps_rdma as bps

RATE = 10_000
KEPT = 500  # silent connections that are open at the same time


def flood(port: int, kind: str) -> None:
    """Runs in a process of its own, until it is killed; prints how many connections it has made each second."""
    kept: list[socket.socket] = []
    made, begin = 0, time.monotonic()
    while True:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.setblocking(kind != "silent")
        connection.connect_ex(("127.0.0.1", port))
        kept.append(connection)
        if len(kept) > (KEPT if kind == "silent" else 0):
            kept.pop(0).close()
        made += 1
        ahead = made / RATE - (time.monotonic() - begin)
        if ahead > 0.001:
            time.sleep(ahead)
        if made % 1000 == 0:
            print(made / (time.monotonic() - begin), flush=True)


def listener_seconds() -> float:
    """CPU time that the listeners of this process have used."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "bps-listener":
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rounds_per_second(array: np.ndarray, length: float) -> tuple[float, float]:
    """Rounds, and the share of a core that the listeners use."""
    bps.barrier()
    rounds, begin, used = 0, time.monotonic(), listener_seconds()
    while time.monotonic() < begin + length:
        for _ in range(10):
            bps.push_pull_inplace(array, name="gradients", average=False)
        rounds += 10
        # All ranks stop after the same round.
        if bps.push_pull(np.full(1, float(time.monotonic() >= begin + length)), name="stop", average=False)[0]:
            break
    seconds = time.monotonic() - begin
    return rounds / seconds, (listener_seconds() - used) / seconds


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="2 at least")
    parser.add_argument("--seconds", type=float, default=1, help="of each phase")
    parser.add_argument("--flood", nargs=2, metavar=("PORT", "KIND"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flood:
        flood(int(args.flood[0]), args.flood[1])
    bps.init()
    array = np.zeros(1 << 20, np.float32)
    rounds_per_second(array, args.seconds)
    scheduler = int(os.environ["BPS_ROOT_PORT"])
    floods = {
        "short, at a closed port": ("short", closed_port()),
        "short, at the scheduler": ("short", scheduler),
        "silent, at the scheduler": ("silent", scheduler),
    }
    kept: dict[str, list[float]] = {name: [] for name in floods}
    reached: dict[str, list[float]] = {name: [] for name in floods}
    listeners: dict[str, list[float]] = {name: [] for name in floods}
    for _ in range(args.pairs):
        for name, (kind, port) in floods.items():
            quiet, _used = rounds_per_second(array, args.seconds)
            command = [sys.executable, __file__, "--flood", str(port), kind]
            flooding = subprocess.Popen(command, stdout=subprocess.PIPE) if bps.rank() == 0 else None
            if flooding is not None and flooding.stdout is not None:
                flooding.stdout.readline()  # it is at work
            rate, used = rounds_per_second(array, args.seconds)
            if flooding is not None and flooding.stdout is not None:
                flooding.kill()
                lines = flooding.stdout.read().split()
                flooding.wait()
                reached[name].append(float(lines[-1]) if lines else 0.0)
            kept[name].append(rate / quiet)
            listeners[name].append(used)
    if bps.rank() == 0:
        for name in floods:
            low, middle, high = statistics.quantiles(kept[name], n=4)
            print(f"{name}: {statistics.median(reached[name]):.0f} connections/s, the job keeps {middle:.2f}", end=" ")
            print(
                f"({low:.2f} to {high:.2f}) of its speed, listeners {statistics.median(listeners[name]):.1%} of a core"
            )
    bps.shutdown()


if __name__ == "__main__":
    main()

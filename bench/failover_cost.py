# SPDX-License-Identifier: Apache-2.0
"""What it costs that the loss of a server goes unnoticed, beside a shadow of the inputs of a sum.

    python bench/failover_cost.py                              # tcp, and mapped memory, 1 to 64 MiB
    python bench/failover_cost.py --hosts aabb                 # as if two ranks each were on two hosts, which sum first
    ci/vm/run .venv/bin/python bench/failover_cost.py --transport rdma

Two workers and one server, in two jobs that are there at the same time and take turns: one with BPS_SERVER_FAILOVER=0,
the other with 1. In the first job every other round also copies the array before it is sent: what a shadow of the
inputs would cost at least. A figure is the quotient of neighbouring rounds; medians, with quartiles. Every
result is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import quartiles

from bps_rdma.launch.environment import LocalJob

WORKER = "FAILOVER_COST_WORKER"


def worker() -> None:
    """Answers each line, {"bytes": n, "times": k, "shadow": whether}, by seconds of each push_pull."""
    import numpy as np

    import bps_rdma as bps

    bps.init()
    print(json.dumps("ready"), flush=True)
    arrays: dict[int, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        nbytes, found = command["bytes"], []
        if nbytes not in arrays:
            make = bps.empty if os.environ[WORKER] == "shared" else np.empty
            arrays[nbytes] = make(nbytes // 4), np.ones(nbytes // 4, np.float32)
        array, shadow = arrays[nbytes]
        for _ in range(command["times"]):
            array[:] = bps.rank() + 1
            bps.barrier()
            begin = time.perf_counter()
            if command["shadow"]:
                np.copyto(shadow, array)
            bps.push_pull_inplace(array, average=False, name=str(nbytes))
            found.append(time.perf_counter() - begin)
            assert (array == bps.size() * (bps.size() + 1) / 2).all(), "wrong result"
        print(json.dumps(found), flush=True)
    bps.shutdown()


class Job(side_by_side.Job):
    """Two workers, or those on these hosts, and one server."""

    def __init__(self, transport: str, memory: str, hosts: str, failover: str) -> None:
        over = f"shm,{transport}" if hosts else transport
        more = {"BPS_SERVER_FAILOVER": failover, "BPS_TIMEOUT": "60", WORKER: memory}
        if "BPS_TEST_HCA" in os.environ:
            more["BPS_RDMA_HCA"] = f"={os.environ['BPS_TEST_HCA']}"
        super().__init__(LocalJob(workers=len(hosts) or 2, servers=1, transport=over, least=1), [], more, hosts)

    def push_pull(self, nbytes: int, times: int, *, shadow: bool = False) -> float:
        """Median seconds of a push_pull, of the slowest worker."""
        answers = self.ask({"bytes": nbytes, "times": times, "shadow": shadow})
        return statistics.median(max(each) for each in zip(*answers, strict=True))


def compare(transport: str, memory: str, hosts: str, sizes: list[float], rounds: int) -> list[dict[str, Any]]:
    without, surviving = (Job(transport, memory, hosts, failover) for failover in ("0", "1"))
    found = []
    try:
        for mib in sizes:
            nbytes, times = int(mib * 2**20), int(min(200, max(3, 64 // mib)))
            ratios, shadows, plain = [], [], []
            for number in range(rounds + 1):
                seconds = without.push_pull(nbytes, times)
                with_it = surviving.push_pull(nbytes, times)
                shadow = without.push_pull(nbytes, times, shadow=True)
                if number == 0:
                    continue  # memory is new
                plain.append(seconds)
                ratios.append(with_it / seconds)
                shadows.append(shadow / seconds)
            print(
                f"{transport}, {memory}, {mib:g} MiB: {statistics.median(plain) * 1e3:.2f} ms; failover "
                f"{quartiles(ratios)}, shadow of inputs {quartiles(shadows)}",
                flush=True,
            )
            found.append({"transport": transport, "memory": memory, "mib": mib, "failover": ratios, "shadow": shadows})
    finally:
        without.end()
        surviving.end()
    return found


def main() -> None:
    if WORKER in os.environ:
        return worker()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("shm", "tcp", "rdma"))
    parser.add_argument("--memory", choices=("plain", "shared"), help="of the arrays (default: shared with shm)")
    parser.add_argument("--hosts", default="", help="aab: two ranks on one host and one on another, over tcp")
    parser.add_argument("--sizes", default="1,4,16,64", help="MiB; 0.0625 is 64 KiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = {"tcp": "plain", "shm": "shared", "rdma": "plain"}
    wanted = [arguments.transport] if arguments.transport else ["tcp"] if arguments.hosts else ["tcp", "shm"]
    sizes = [float(size) for size in arguments.sizes.split(",")]
    found = [
        one
        for transport in wanted
        for one in compare(transport, arguments.memory or cases[transport], arguments.hosts, sizes, arguments.rounds)
    ]
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    return None


if __name__ == "__main__":
    main()

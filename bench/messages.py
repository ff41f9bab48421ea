# SPDX-License-Identifier: Apache-2.0
"""Compares send and recv, all_to_all, gather and scatter on the torch backend bps with gloo, and with MPI.

    .venv/bin/python bench/messages.py [--ranks 2] [--rounds 41] [--transport shm] [--compare gloo,openmpi]

Groups of bps and of gloo have the same ranks, in the same processes; MPI has ranks of its own, which sleep while it is
another library's turn. Rounds of all alternate, and ratios compare neighbouring rounds, so that other work on the
machine disturbs all of them. The time of a round is that of its slowest rank. Every result is verified.

- ping-pong: rank 0 sends to rank 1 and gets as much back; the time is half of that.
- all_to_all: all_to_all_single, with so many bytes on each rank.
- gather, scatter: so many bytes of each rank, to or from rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from message_ranks import Arrays, serve
from side_by_side import quartiles, ratios

from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Children
from bps_rdma.tools.bench import teams
from bps_rdma.tools.bench.baselines import fall_in_step
from bps_rdma.tools.bench.plan import MPI_BASELINES
from bps_rdma.tools.bench.worker import CHANNEL
from bps_rdma.tools.ranks import Ranks

SIZES = [1 << shift for shift in (3, 10, 16, 20, 24)]
ROUND_BYTES = 32 << 20  # per round, with at most 64 calls
KINDS = ("ping-pong", "all_to_all", "gather", "scatter")
SECONDS = 300.0  # for one round


def rank_main() -> None:
    import torch
    import torch.distributed as dist

    import bps_rdma.torch  # noqa: F401  registers the backend

    dist.init_process_group("bps")
    groups = {"bps": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rank = dist.get_rank()

    def begin(arrays: Arrays, kind: str, library: str) -> Callable[[], Any]:
        own, got, group = torch.from_numpy(arrays.own), torch.from_numpy(arrays.got), groups[library]
        parts = list(torch.from_numpy(arrays.parts)) if rank == 0 else None

        def ping_pong() -> None:
            if rank == 0:
                dist.send(own, 1, group=group)
                dist.recv(got, 1, group=group)
            elif rank == 1:
                dist.recv(got, 0, group=group)
                dist.send(own, 0, group=group)

        return {
            "ping-pong": ping_pong,
            "all_to_all": lambda: dist.all_to_all_single(got, own, group=group),
            "gather": lambda: dist.gather(own, parts, dst=0, group=group),
            "scatter": lambda: dist.scatter(got, parts, src=0, group=group),
        }[kind]

    serve(socket.socket(fileno=int(os.environ[CHANNEL])), rank, dist.get_world_size(), begin, fall_in_step)
    dist.destroy_process_group()


def start_ours(children: Children, job: LocalJob) -> Ranks:
    ranks = Ranks(children, SECONDS)
    for rank in range(job.workers):
        ours, theirs = socket.socketpair()
        env = job.worker(rank) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", CHANNEL: str(theirs.fileno())}
        ranks.add(
            children.spawn(f"rank {rank}", [sys.executable, __file__, "--rank-main"], env, [theirs.fileno()]), ours
        )
        theirs.close()
    return ranks


def measure(job: LocalJob, others: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Seconds per call of the slowest rank, by kind, size, library and round."""
    found = []
    with teams.folder_for_shared_memory("openmpi" in others) as shared, Children() as children:
        ours = start_ours(children, job)
        of = {"bps": ours, "gloo": ours}
        script = [str(Path(__file__).with_name("message_ranks.py"))]
        for name in set(others) & set(MPI_BASELINES):
            of[name] = teams.start_under_mpi(children, name, script, {}, job.workers, shared)
        libraries = ("bps", *others)
        for kind in KINDS:
            for size in SIZES:
                elements = max(size // 8, job.workers if kind == "all_to_all" else 1)
                calls = max(1, min(64, ROUND_BYTES // size))
                times: dict[str, list[float]] = {name: [] for name in libraries}
                for index in range(-1, rounds):  # the first to warm up
                    for name in libraries if index % 2 else reversed(libraries):
                        said = of[name].request(kind=kind, elements=elements, calls=calls, library=name)
                        if index >= 0:
                            times[name].append(max(each["seconds"] for each in said))
                found.append({"kind": kind, "bytes": size, "times": times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--compare", default="gloo", help="of gloo, openmpi, mpich; separated by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_main:
        rank_main()
        return
    others = options.compare.split(",")
    if unknown := set(others) - {"gloo", *MPI_BASELINES}:
        parser.error(f"--compare: {', '.join(unknown)} is none of gloo, {', '.join(MPI_BASELINES)}")
    rows = []
    for found in measure(LocalJob(workers=options.ranks, transport=options.transport), others, options.rounds):
        times = found.pop("times")
        row = found | {f"{name}_us": statistics.median(each) * 1e6 for name, each in times.items()}
        row["times as fast"] = {name: quartiles(ratios(times[name], times["bps"])) for name in others}
        rows.append(row)
        beside = "; ".join(f"{name} {row[f'{name}_us']:.1f} us, {row['times as fast'][name]}" for name in others)
        print(f"{row['kind']:>10} {row['bytes']:>10,d} bytes: bps {row['bps_us']:8.1f} us; {beside} times as fast")
    if options.json:
        said = {"ranks": options.ranks, "rounds": options.rounds, "transport": options.transport}
        options.json.write_text(json.dumps(said | {"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

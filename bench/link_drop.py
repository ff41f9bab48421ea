# SPDX-License-Identifier: Apache-2.0
"""Measures how fast servers follow a link that becomes slow in the middle of a run, and is fast again later.

    sudo .venv/bin/python bench/link_drop.py --workers 4 --servers 1 --rate 100 --host "server 0" --factor 0.25

The hosts are those of bench/link_lab.py. After some rounds the link of --host carries --factor of what it did; after
others all of it again. The program prints the time of each round beside what the best placement takes on the links as
they are, how many rounds it took to come near that, what the servers of that host sum before and after, and how often
servers got other weights.

Needs root to create network namespaces, and removes them at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import link_lab

from bps_rdma import _core
from bps_rdma.launch.process import Children
from bps_rdma.launch.run import spawn_helpers
from bps_rdma.tools.bench import teams
from bps_rdma.tools.bench.plan import Plan, make_cases, parse_size

NEAR = 1 / 0.9  # of the best time


def change_link(switch: link_lab.Switch, host: link_lab.Host, mbit: float) -> None:
    for namespace, device in ((host.name, "eth0"), (switch.name, host.port)):
        bucket = ["rate", f"{mbit}mbit", "burst", link_lab.BURST, "latency", link_lab.QUEUE]
        link_lab.run("tc", "-n", namespace, "qdisc", "change", "dev", device, "root", "tbf", *bucket)


def best_seconds(nbytes: int, workers: Sequence[float], servers: Sequence[float]) -> float:
    sites = [(mbit * 1e6 / 8, math.inf, 1) for mbit in workers] + [(mbit * 1e6 / 8, math.inf, 0) for mbit in servers]
    return nbytes * _core.seconds_per_byte(sites, _core.link_shares(sites))


def placement(job: link_lab.LabJob, label: str) -> tuple[float, int]:
    """The part of all sums that the server "server 0" or of "rank 2" has, and how often servers got other weights."""
    dump = ["ip", "netns", "exec", job.hosts["rank 0"].name, sys.executable, "-P", "-m", "bps_rdma", "dump"]
    state = json.loads(link_lab.run(*dump))[0]
    kind, number = label.split()
    key = "rank" if kind == "rank" else "server_rank"
    member = next(one for one in state["members"][0]["members"] if one[key] == int(number))
    return member.get("share", 0), state["scheduler"]["shifts"]


def rounds_until_near(seconds: Sequence[float], best: float) -> int | None:
    """The first round from which on the median of what is left is near the best."""
    for first in range(len(seconds) - 2):
        if statistics.median(seconds[first : first + 5]) <= best * NEAR:
            return first
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="hosts with workers")
    parser.add_argument("--servers", type=int, default=1, help="servers on hosts of their own")
    parser.add_argument("--rate", type=float, default=100, help="rate of every link in Mbit/s, in each direction")
    parser.add_argument("--host", default="server 0", help='whose link changes: "server 0", "rank 2"')
    parser.add_argument("--factor", type=float, default=0.25, help="what its link carries then")
    parser.add_argument("--size", default="16M")
    parser.add_argument("--rounds", type=int, default=20, help="of each of the three parts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: creating network namespaces needs root\nhint: use sudo, or a container with CAP_SYS_ADMIN")
    nbytes = parse_size(args.size)
    workers, servers = [args.rate] * args.workers, [args.rate] * args.servers
    plan = Plan(cases=make_cases(str(nbytes), "float32", "push_pull", 1, 1), compare=(), bound=False)
    slow_workers, slow_servers = list(workers), list(servers)
    kind, number = args.host.split()
    (slow_workers if kind == "rank" else slow_servers)[int(number)] *= args.factor
    parts: list[dict[str, Any]] = []
    shifts = checked = 0
    with link_lab.lab(workers, 1, servers, 0) as (switch, job), Children() as children:
        spawn_helpers(children, job)
        team = teams.start_ours(children, plan, job, None)
        team.gather()
        team.request(do="case", index=0)
        team.request(do="rounds", count=2)
        for name, factor, links in (
            ("as it was", 1.0, (workers, servers)),
            (f"{args.host} at {args.factor:g}", args.factor, (slow_workers, slow_servers)),
            ("as it was again", 1.0, (workers, servers)),
        ):
            change_link(switch, job.hosts[args.host], args.rate * factor)
            seconds = []
            for _ in range(args.rounds):  # one by one, so that each has its time
                answers = team.request(do="rounds", count=1)
                seconds += [max(answer["runs"]["bps_rdma"]["seconds"][0] for answer in answers)]
            checked = sum(answer["checked"] for answer in answers)
            best = best_seconds(nbytes, *links)
            share, shifts = placement(job, args.host)
            parts.append({"name": name, "seconds": seconds, "best": best, "share": share, "shifts": shifts})
            tail = statistics.median(seconds[len(seconds) // 2 :])
            print(f"{name}: {' '.join(f'{one:.2f}' for one in seconds)} s", flush=True)
            print(
                f"  the best placement takes {best:.2f} s; the second half {tail:.2f} s, {best / tail:.3f} of the best "
                f"goodput; near it from round {rounds_until_near(seconds, best)}",
                flush=True,
            )
        team.request(do="end")
    shares = ", then ".join(f"{part['share']:.3f}" for part in parts)
    print(f"{args.host} sums {shares} of all; {shifts} shifts; {checked} results checked, all exact")
    if args.json:
        args.json.write_text(json.dumps(vars(args) | {"json": str(args.json), "parts": parts}) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
r"""Simulates hosts with separate links on one machine: network namespaces, connected by a switch, with limited rates.

    sudo .venv/bin/python bench/link_lab.py --workers 4 --servers 4 --rate 300
    sudo .venv/bin/python bench/link_lab.py --workers 4                           # servers inside the workers
    sudo .venv/bin/python bench/link_lab.py --workers 2 --ranks-per-host 1,2,4,8  # as nodes with several GPUs
    sudo .venv/bin/python bench/link_lab.py --workers 4 --servers 2 --server-links 1,0.25  # a slow spare host

What each spare host brings, measured and drawn (docs/servers.md, docs/performance.md), and drawn again:

    sudo .venv/bin/python bench/link_lab.py --workers 4 --servers 0,1,2,3,4 --rate 100 --size 32M --rounds 4 \
        --json bench/spare_hosts.json --plot docs/spare_hosts.png
    .venv/bin/python bench/link_lab.py --draw bench/spare_hosts.json --plot docs/spare_hosts.png

Workers and servers, each on its own host, sum a tensor; rounds alternate with gloo's all_reduce on the workers' hosts.
With --ranks-per-host each of the workers' hosts has several ranks, which share its link.
The rate must be so low that the links are the limit, not this machine's cores; the load of the busiest core is shown.
The program prints the goodput per worker (bytes of the tensor / time), its share of the line rate, what the best
placement of sums would reach (csrc/van/link_shares.h), and the bytes that the interfaces counted on the links.

Needs root to create network namespaces, and removes them at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bps_rdma import _core
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Children
from bps_rdma.launch.run import spawn_helpers
from bps_rdma.tools.bench import teams
from bps_rdma.tools.bench.plan import Plan, format_size, make_cases, parse_size
from bps_rdma.tools.bench.stats import Timing, compare, merge

SUBNET = "10.77.0"
MTU = 9000  # as in training clusters; with 1500 the headers alone take 4.4 %
BURST = "128kb"  # of a token bucket: two segments as large as the stack makes them
QUEUE = "50ms"


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    name: str  # its namespace
    address: str
    port: str  # of the switch
    mbit: float | None  # of its link; None: unlimited


class Switch:
    """A bridge in its own namespace, and hosts that are connected to it."""

    def __init__(self) -> None:
        self.name = f"bps-lab-{os.getpid()}"
        self.hosts: list[Host] = []
        self.namespaces = [self.name]
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.name, "link", "set", "bridge", "up")

    def add_host(self, mbit: float | None) -> Host:
        """A host whose link carries `mbit` Mbit/s in each direction; None: unlimited."""
        index = len(self.hosts)
        host = Host(f"{self.name}-{index}", f"{SUBNET}.{index + 1}", f"port{index}", mbit)
        run("ip", "netns", "add", host.name)
        self.namespaces.append(host.name)
        cable = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
        run("ip", "-n", self.name, "link", "add", host.port, "mtu", str(MTU), *cable)
        run("ip", "-n", self.name, "link", "set", host.port, "master", "bridge", "up")
        run("ip", "-n", host.name, "link", "set", "lo", "up")
        run("ip", "-n", host.name, "link", "set", "eth0", "mtu", str(MTU), "up")
        run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        if mbit is not None:
            for namespace, device in ((host.name, "eth0"), (self.name, host.port)):
                bucket = ["rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE]
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)
        self.hosts.append(host)
        return host

    def carried(self) -> dict[str, tuple[int, int]]:
        """Bytes so far over each host's link: (from the host, to the host)."""
        shown = json.loads(run("ip", "-n", self.name, "-j", "-s", "link", "show"))
        ports = {link["ifname"]: link["stats64"] for link in shown}
        return {h.name: (ports[h.port]["rx"]["bytes"], ports[h.port]["tx"]["bytes"]) for h in self.hosts}

    def remove(self) -> None:
        for name in self.namespaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)


@dataclass(frozen=True)
class LabJob(LocalJob):
    """A job with members on hosts of the lab; `hosts` maps labels ("rank 0", "server 0", "scheduler") to hosts."""

    hosts: dict[str, Host] = field(default_factory=dict)
    partition: int = 0  # 0: what bps_rdma chooses
    ranks_per_host: int = 1

    def placed(self, label: str, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.hosts[label].name, *command]

    def worker(self, rank: int) -> dict[str, str]:
        local = {"LOCAL_RANK": str(rank % self.ranks_per_host)}
        if self.least is not None:  # its ranks have a role, and such a process is placed by its machine's number
            local["BPS_WORKER_ID"] = str(rank // self.ranks_per_host)
        return super().worker(rank) | self._place(f"rank {rank}") | local

    def role(self, label: str) -> dict[str, str]:
        return super().role(label) | self._place(label)

    def _place(self, label: str) -> dict[str, str]:
        root = self.hosts.get("scheduler", self.hosts["rank 0"]).address
        return {
            "BPS_TRANSPORT": "shm,tcp",  # shared memory within a namespace
            "BPS_NODE_HOST": self.hosts[label].address,
            "BPS_LINK_GBPS": str((self.hosts[label].mbit or 1e5) / 1e3),
            "BPS_ROOT_URI": root,
            "MASTER_ADDR": self.hosts["rank 0"].address,
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "BPS_NUM_WORKERS": str(self.workers // self.ranks_per_host),  # machines
            "GLOO_SOCKET_IFNAME": "eth0",
            "BPS_SPIN_US": "0",  # all hosts share this machine's cores
            "OMP_NUM_THREADS": "1",
        } | ({"BYTEPS_PARTITION_BYTES": str(self.partition)} if self.partition else {})


@contextlib.contextmanager
def lab(
    workers: Sequence[float], ranks: int, servers: Sequence[float], partition: int, least: int | None = None
) -> Iterator[tuple[Switch, LabJob]]:
    """A switch with the hosts of a job, by the rates of their links in Mbit/s, `ranks` on each of the workers'.

    Without `servers`, servers run inside the workers.
    """
    switch = Switch()
    try:
        machines = [switch.add_host(mbit) for mbit in workers]
        hosts = {f"rank {i}": machines[i // ranks] for i in range(len(workers) * ranks)}
        hosts |= {f"server {i}": switch.add_host(mbit) for i, mbit in enumerate(servers)}
        if servers or least is not None:  # otherwise rank 0 is the scheduler, too
            hosts["scheduler"] = switch.add_host(None)
        yield (
            switch,
            LabJob(
                workers=len(workers) * ranks,
                servers=len(servers) or None,
                hosts=hosts,
                partition=partition,
                least=least,
                ranks_per_host=ranks,
            ),
        )
    finally:
        switch.remove()


def rates(args: argparse.Namespace, links: str, most: int, count: int) -> list[float]:
    """Mbit/s of the first `count` of `most` links: all alike, or as the list of factors says."""
    factors = [float(one) for one in links.split(",")] if links else [1.0] * most
    if len(factors) != most:
        sys.exit(f"error: {links} names {len(factors)} links, and there are {most} such hosts")
    return [args.rate * factor for factor in factors[:count]]


def worker_rates(args: argparse.Namespace) -> list[float]:
    return rates(args, args.worker_links, args.workers, args.workers)


def server_rates(args: argparse.Namespace, servers: int) -> list[float]:
    return rates(args, args.server_links, max(counts(args.servers)), servers)


def counts(numbers: str) -> list[int]:
    return [int(one) for one in numbers.split(",")]


def best_goodput(args: argparse.Namespace, servers: int, ranks: int) -> float:
    """What the best placement reaches, in bytes per second. A host's ranks contribute once."""
    contributions = 1 if args.workers > 1 else ranks
    sites = [(mbit * 1e6 / 8, math.inf, contributions) for mbit in worker_rates(args)]
    sites += [(mbit * 1e6 / 8, math.inf, 0) for mbit in server_rates(args, servers)]
    return 1 / _core.seconds_per_byte(sites, _core.link_shares(sites))


def cpu_busy() -> list[float]:
    lines = Path("/proc/stat").read_text().splitlines()
    cores = [[int(x) for x in line.split()[1:]] for line in lines if line.startswith("cpu") and line[3].isdigit()]
    return [sum(core) - core[3] - core[4] for core in cores]


@dataclass
class Measured:
    """One implementation: times of rounds, bytes per round on each host's link, and the load of the busiest core."""

    timing: Timing
    carried: dict[str, tuple[float, float]]
    busiest: float


def measure(args: argparse.Namespace, servers: int, ranks: int) -> dict[str, Measured]:
    """Run alternating rounds of all implementations, then some of each alone to count the bytes that it sends."""
    nbytes, rounds = parse_size(args.size), args.rounds
    cases = make_cases(str(nbytes), "float32", "push_pull", 1, 1)
    plan = Plan(cases=cases, compare=() if args.no_gloo else ("gloo",), bound=False)
    partition = parse_size(args.partition) if args.partition else 0
    place = lab(worker_rates(args), ranks, server_rates(args, servers), partition, args.least)
    with place as (switch, job), Children() as children:
        spawn_helpers(children, job)
        team = teams.start_ours(children, plan, job, None)
        team.gather()
        team.request(do="case", index=0)
        team.request(do="rounds", count=2)
        answers = team.request(do="rounds", count=rounds)
        found = {}
        for name in answers[0]["runs"]:
            before, busy, begin = switch.carried(), cpu_busy(), time.monotonic()
            alone = max(2, rounds // 2)
            team.request(do="rounds", count=alone, only=name)
            seconds = time.monotonic() - begin
            after, hertz = switch.carried(), os.sysconf("SC_CLK_TCK")
            found[name] = Measured(
                merge([answer["runs"][name] for answer in answers]),
                {
                    host.name: tuple((b - a) / alone for a, b in zip(before[host.name], after[host.name], strict=True))
                    for host in switch.hosts
                },
                max((b - a) / hertz / seconds for a, b in zip(busy, cpu_busy(), strict=True)),
            )
        team.request(do="end")
    return found


def place_of(servers: int) -> str:
    return f"{servers} spare {'host' if servers == 1 else 'hosts'}" if servers else "servers inside the workers"


def report(args: argparse.Namespace, servers: int, ranks: int, found: dict[str, Measured]) -> dict[str, Any]:
    """Print one count of servers and of ranks per host, and return it for --json."""
    nbytes, line = parse_size(args.size), args.rate * 1e6 / 8
    place = place_of(servers)
    what = f"{format_size(nbytes)} in pieces {f'of {args.partition}' if args.partition else 'that suit the link'}"
    who = f"{args.workers} hosts with {ranks} {'rank' if ranks == 1 else 'ranks'} each"
    print(f"{who}, {place}, {args.rate:g} Mbit/s links, tcp, {what}")
    best = best_goodput(args, servers, ranks)
    print(f"the best placement of sums reaches {best / 1e6:.1f} MB/s, {best / line:.3f} of line rate")
    rows: dict[str, Any] = {"servers": servers, "ranks_per_host": ranks, "best_mb_per_s": best / 1e6}
    for name, one in found.items():
        goodput = nbytes / one.timing.median
        up = max(a for a, _ in one.carried.values()) / nbytes
        down = max(b for _, b in one.carried.values()) / nbytes
        low, high = nbytes / max(one.timing.seconds), nbytes / min(one.timing.seconds)
        rows[name] = {
            "goodput_mb_per_s": goodput / 1e6,
            "range_mb_per_s": [low / 1e6, high / 1e6],
            "share_of_line_rate": goodput / line,
            "share_of_best": goodput / best,
            "busiest_link_up": up,
            "busiest_link_down": down,
            "link_use": max(up, down) * goodput / line,
            "busiest_core": one.busiest,
            "seconds": list(one.timing.seconds),
        }
        print(
            f"{name:9} {goodput / 1e6:6.1f} MB/s per worker ({low / 1e6:.1f} to {high / 1e6:.1f}), "
            f"{goodput / line:.3f} of line rate, {goodput / best:.3f} of the best; busiest link "
            f"carried {up:.2f} up and {down:.2f} down times the tensor, {max(up, down) * goodput / line:.3f} of "
            f"what it can; busiest core {one.busiest:.0%}"
        )
    if "gloo" in found:
        ratio = compare(found["bps_rdma"].timing, found["gloo"].timing)
        print(f"{ratio.median:.2f} times as fast as gloo ({ratio.lower:.2f} to {ratio.upper:.2f})")
        rows["speedup"] = {"median": ratio.median, "lower": ratio.lower, "upper": ratio.upper}
    return rows


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """A panel for each --json: goodput over the number of spare hosts, if it has several, else of ranks per host."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(results), figsize=(1.8 + 4.2 * len(results), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, result in zip(panels[0], results, strict=True):
        by_servers = len({row["servers"] for row in result["found"]}) > 1
        (plot_spare_hosts if by_servers else plot_ranks)(axes, result)
        axes.set_ylim(bottom=0)
    panels[0][-1].legend(*panels[0][0].get_legend_handles_labels(), loc="lower right", frameon=False)
    same = results[0]
    size = format_size(parse_size(same["size"]))
    what = f"averaging {size} over links of {same['rate']:g} Mbit/s"
    if len(results) == 1:
        panels[0][0].set_title(f"{panels[0][0].get_title()}, {what}", fontsize="medium")
    else:
        figure.suptitle(what, fontsize="medium")
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def goodput(result: dict[str, Any], name: str) -> tuple[list[float], list[list[float]]]:
    """The shares of line rate of one implementation, and how far the rounds reach below and above."""
    line = result["rate"] / 8
    rows = [row[name] for row in result["found"] if name in row]
    middle = [row["goodput_mb_per_s"] / line for row in rows]
    low = [m - row["range_mb_per_s"][0] / line for m, row in zip(middle, rows, strict=True)]
    high = [row["range_mb_per_s"][1] / line - m for m, row in zip(middle, rows, strict=True)]
    return middle, [low, high]


def plot_spare_hosts(axes: Any, result: dict[str, Any]) -> None:
    found = result["found"]
    spares = [row["servers"] for row in found]
    best = [row["best_mb_per_s"] / (result["rate"] / 8) for row in found]
    axes.plot(spares, best, "--", color="#666666", label="best possible")
    for name, label, colour in (("bps_rdma", "bps_rdma", "#0b5394"), ("gloo", "gloo's ring", "#e69138")):
        middle, reach = goodput(result, name)
        if middle:
            axes.errorbar(spares, middle, yerr=reach, fmt="o-", markersize=4, capsize=3, color=colour, label=label)
    axes.set(xlabel="spare hosts that add", ylabel="goodput / link's speed", xticks=spares)
    axes.set_title(f"{result['workers']} hosts that train", fontsize="medium")
    axes.grid(visible=True, alpha=0.3)


def plot_ranks(axes: Any, result: dict[str, Any]) -> None:
    found = result["found"]
    for offset, (name, label) in zip((-0.2, 0.2), (("bps_rdma", "bps_rdma"), ("gloo", "gloo's ring")), strict=True):
        middle, reach = goodput(result, name)
        axes.bar([index + offset for index in range(len(middle))], middle, 0.38, yerr=reach, capsize=3, label=label)
    axes.axhline(1, color="gray", linestyle="--", label="link's speed")
    axes.set_xticks(range(len(found)), [str(row["ranks_per_host"]) for row in found])
    axes.set(xlabel="ranks per host", ylabel="goodput / link's speed")
    axes.set_title(f"{result['workers']} hosts, {place_of(found[0]['servers'])}", fontsize="medium")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="hosts with workers")
    parser.add_argument("--ranks-per-host", default="1", help="ranks on each of them; several counts: 1,2,4,8")
    parser.add_argument("--servers", default="0", help="spare hosts with a server each; several counts: 0,1,2,3,4")
    parser.add_argument("--rate", type=float, default=300, help="rate of every link in Mbit/s, in each direction")
    parser.add_argument("--worker-links", default="", help="factors of --rate for each worker's host: 1,1,1,0.5")
    parser.add_argument("--server-links", default="", help="the same for spare hosts")
    parser.add_argument("--size", default="64M")
    parser.add_argument("--partition", default="", help="BYTEPS_PARTITION_BYTES; by default what suits the link")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--least", type=int, help="BPS_MIN_WORKERS; with it the loss of a server goes unnoticed")
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw goodput by spare hosts, or by ranks per host, into this file")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="JSON", help="measure nothing; --plot these results")
    args = parser.parse_args()
    if args.draw:
        plot(args.plot, [json.loads(path.read_text()) for path in args.draw])
        return
    if os.geteuid() != 0:
        sys.exit("error: creating network namespaces needs root\nhint: use sudo, or a container with CAP_SYS_ADMIN")
    found = [
        report(args, servers, ranks, measure(args, servers, ranks))
        for servers in counts(args.servers)
        for ranks in counts(args.ranks_per_host)
    ]
    result = {name: value for name, value in vars(args).items() if name not in ("json", "plot", "draw")}
    result |= {"server_loops": min(os.cpu_count() or 1, 4), "found": found}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(args.plot, [result])


if __name__ == "__main__":
    main()

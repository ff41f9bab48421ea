# SPDX-License-Identifier: Apache-2.0
"""Plots the predictions of the scale model, and compares them with measurements of the link lab.

.venv/bin/python bench/scale_model.py --plot docs/placement.png
.venv/bin/python bench/scale_model.py --lab bench/spare_hosts.json       # from bench/link_lab.py --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bps_rdma.tools.bench.plan import format_size, parse_size
from bps_rdma.tools.scale_model import Hosts, Prediction, Protocol, partition_for, ring_seconds, simulate

GBIT = 400.0
NBYTES = 4 << 30
# Servers sum as fast as pieces arrive, so that only the network counts.
NETWORK = Protocol(sum_bytes_per_s=1e12, piece_s=1e-6, server_loops=4)
COLOURS = ("#0b5394", "#e69138", "#6aa84f", "#a64d79", "#666666")


def both(workers: int, spares: int) -> list[Hosts]:
    """Hosts with workers and their servers, and spare hosts."""
    return [Hosts(workers, GBIT, worker=True, server=True), *([Hosts(spares, GBIT, server=True)] if spares else [])]


def lab_hosts(lab: dict[str, Any], servers: int, ranks: int) -> list[Hosts]:
    """The hosts of a measurement, each with the speed of its link."""

    def links(factors: str, count: int) -> list[float]:
        named = [float(one) for one in factors.split(",")] if factors else [1.0] * count
        return [lab["rate"] * factor / 1e3 for factor in named[:count]]

    workers = [Hosts(1, gbit, True, True, ranks) for gbit in links(lab["worker_links"], lab["workers"])]
    return workers + [Hosts(1, gbit, server=True) for gbit in links(lab["server_links"], servers)]


def compare_with_lab(paths: list[Path]) -> None:
    for path in paths:
        lab = json.loads(path.read_text())
        nbytes = parse_size(lab["size"])
        for row in lab["found"]:
            ranks, servers, found = row["ranks_per_host"], row["servers"], row["bps_rdma"]
            hosts = lab_hosts(lab, servers, ranks)
            # Empty: the lab left them to the library.
            pieces = parse_size(lab["partition"]) if lab["partition"] else partition_for(hosts)
            predicted = simulate(hosts, nbytes, Protocol(partition_bytes=pieces, server_loops=lab["server_loops"]))
            measured = nbytes / (found["goodput_mb_per_s"] * 1e6)
            print(
                f"{lab['workers']} hosts of {ranks}, {servers} spare, pieces of {format_size(pieces)}: measured "
                f"{measured:.3f} s, predicted {predicted.seconds:.3f} s ({predicted.seconds / measured - 1:+.1%}); "
                f"busiest link down {found['busiest_link_down']:.3f} x, "
                f"predicted {max(link.down for link in predicted.links) / nbytes:.3f} x"
            )
            if "gloo" in row:
                ring = ring_seconds(lab["workers"], min(host.gbit_per_s for host in hosts if host.worker), nbytes)
                gloo = nbytes / (row["gloo"]["goodput_mb_per_s"] * 1e6)
                print(f"    gloo: measured {gloo:.3f} s, a ring of a rank per host takes at least {ring:.3f} s")


def draw(path: Path) -> None:
    mpl.use("Agg")
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    (times, spares_needed), (slow, memory) = figure.subplots(2, 2)

    counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    ways: list[tuple[str, list[float]]] = [
        ("ring all-reduce", [ring_seconds(n, GBIT, NBYTES) for n in counts]),
        ("no spare host", [simulate(both(n, 0), NBYTES, NETWORK).seconds for n in counts]),
        ("1 for 4 workers", [simulate(both(n, max(n // 4, 1)), NBYTES, NETWORK).seconds for n in counts]),
        ("1 for 2 workers", [simulate(both(n, n // 2), NBYTES, NETWORK).seconds for n in counts]),
        ("1 for each worker", [simulate(both(n, n), NBYTES, NETWORK).seconds for n in counts]),
    ]
    for (label, seconds), colour in zip(ways, COLOURS, strict=True):
        times.plot(counts, [s * 1e3 for s in seconds], marker="o", markersize=3, color=colour, label=label)
    times.set(xscale="log", xlabel="workers", ylabel="ms per round", title="4 GiB, links of 400 Gbit/s")
    times.set_ylim(bottom=0)

    for workers, colour in zip((8, 64, 512), COLOURS, strict=False):
        spares = sorted({round(workers * k / 16) for k in range(21)})
        found = [simulate(both(workers, k), NBYTES, NETWORK) for k in spares]
        share = [k / workers for k in spares]
        spares_needed.plot(share, [shared(one) for one in found], color=colour, label=f"{workers} workers")
    spares_needed.set(xlabel="spare hosts per worker", ylabel="goodput / line rate", title="How many spare hosts")

    rates = [25, 50, 100, 200, 300, 400]
    for count, colour in zip((1, 8, 63), COLOURS, strict=False):
        clusters = [[*both(64, 64 - count), Hosts(count, rate, server=True)] for rate in rates]
        found = [simulate(hosts, NBYTES, NETWORK) for hosts in clusters]
        slow.plot(
            rates,
            [shared(one) for one in found],
            marker="o",
            markersize=3,
            color=colour,
            label=f"{count} of 64 spare hosts",
        )
    slow.set(
        xlabel="Gbit/s of the slow spare hosts",
        ylabel="goodput / line rate",
        title="Slow links, 64 workers of 400 Gbit/s",
    )

    for window, colour in zip((2, 4, 8), COLOURS, strict=False):
        protocol = Protocol(window=window, server_loops=4)
        gib = [simulate(both(n, max(n // 8, 1)), NBYTES, protocol).server_memory / 2**30 for n in counts]
        memory.plot(counts, gib, marker="o", markersize=3, color=colour, label=f"BPS_SERVER_WINDOW={window}")
    memory.set(
        xscale="log",
        yscale="log",
        xlabel="workers",
        ylabel="GiB on one server",
        title="Landing slots, 4 loops, pieces of 512 KiB",
    )

    for axis in (times, spares_needed, slow, memory):
        axis.grid(visible=True, alpha=0.3)
        axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def shared(found: Prediction) -> float:
    return found.goodput / (GBIT * 1e9 / 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, nargs="+", default=[])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    compare_with_lab(args.lab)
    if args.plot:
        draw(args.plot)
    if not args.lab and not args.plot:
        parser.error("nothing to do: give --plot, --lab or both")


if __name__ == "__main__":
    main()

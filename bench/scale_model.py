# SPDX-License-Identifier: Apache-2.0
"""Plots the predictions of the scale model, and compares them with measurements of the link lab.

.venv/bin/python bench/scale_model.py --plot placement.png
.venv/bin/python bench/scale_model.py --lab lab22.json lab44.json       # from bench/link_lab.py --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from bps_rdma.tools.bench.plan import format_size, parse_size
from bps_rdma.tools.scale_model import Hosts, Prediction, Protocol, ring_seconds, simulate

GBIT = 400.0
NBYTES = 1 << 30
# Servers sum as fast as pieces arrive, so that only the network counts.
NETWORK = Protocol(sum_bytes_per_s=1e12, piece_s=1e-6, server_loops=4)
COLOURS = ("#0b5394", "#e69138", "#6aa84f", "#a64d79", "#666666")


def separate(workers: int, servers: int, gbit: float = GBIT, servers_gbit: float = GBIT) -> list[Hosts]:
    return [Hosts(workers, gbit, worker=True), Hosts(servers, servers_gbit, server=True)]


def compare_with_lab(paths: list[Path]) -> None:
    for path in paths:
        lab = json.loads(path.read_text())
        gbit = lab["rate"] / 1e3
        workers, servers, nbytes = lab["workers"], lab["servers"], parse_size(lab["size"])
        pieces = lab["partition"]  # empty: the lab left them to the library, and this to the model
        protocol = Protocol(partition_bytes=parse_size(pieces)) if pieces else Protocol()
        pieces = pieces or format_size(protocol.partition_bytes)
        place = f"{servers} servers" if servers else "servers inside"
        for row in lab["found"]:
            ranks, found = row["ranks_per_host"], row["bps_rdma"]
            hosts = [Hosts(workers, gbit, worker=True, server=not servers, ranks=ranks)]
            if servers:
                hosts.append(Hosts(servers, gbit, server=True))
            predicted = simulate(hosts, nbytes, protocol)
            measured = nbytes / (found["goodput_mb_per_s"] * 1e6)
            print(
                f"{workers} hosts of {ranks}, {place}, pieces of {pieces}: measured {measured:.3f} s, "
                f"predicted {predicted.seconds:.3f} s ({predicted.seconds / measured - 1:+.1%}); busiest link down "
                f"{found['busiest_link_down']:.3f} x, "
                f"predicted {max(link.down for link in predicted.links) / nbytes:.3f} x"
            )
            if "gloo" in row:
                ring = ring_seconds(workers, gbit, nbytes)
                gloo = nbytes / (row["gloo"]["goodput_mb_per_s"] * 1e6)
                print(f"    gloo: measured {gloo:.3f} s, a ring of a rank per host takes at least {ring:.3f} s")


def draw(path: Path) -> None:
    mpl.use("Agg")
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    (times, servers_needed), (slow, memory) = figure.subplots(2, 2)

    counts = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    ways: list[tuple[str, list[float]]] = [
        ("ring all-reduce", [ring_seconds(n, GBIT, NBYTES) for n in counts]),
        (
            "servers inside the workers",
            [simulate([Hosts(n, GBIT, True, True)], NBYTES, NETWORK).seconds for n in counts],
        ),
        ("1 server per 4 workers", [simulate(separate(n, max(n // 4, 1)), NBYTES, NETWORK).seconds for n in counts]),
        ("1 server per 2 workers", [simulate(separate(n, n // 2), NBYTES, NETWORK).seconds for n in counts]),
        ("1 server per worker", [simulate(separate(n, n), NBYTES, NETWORK).seconds for n in counts]),
    ]
    for (label, seconds), colour in zip(ways, COLOURS, strict=True):
        times.plot(counts, [s * 1e3 for s in seconds], marker="o", markersize=3, color=colour, label=label)
    times.set(xscale="log", xlabel="workers", ylabel="ms per round", title="1 GiB, links of 400 Gbit/s")
    times.set_ylim(bottom=0)

    share = [k / 32 for k in range(1, 49)]
    for workers, colour in zip((8, 64, 512), COLOURS, strict=False):
        found = [simulate(separate(workers, max(round(workers * s), 1)), NBYTES, NETWORK) for s in share]
        servers_needed.plot(share, [shared(one) for one in found], color=colour, label=f"{workers} workers")
    servers_needed.set(xlabel="servers per worker", ylabel="goodput / line rate", title="How many servers")

    rates = [25, 50, 100, 200, 300, 400]
    for count, colour in zip((1, 8, 63), COLOURS, strict=False):
        found = [
            simulate(
                [Hosts(64, GBIT, True), Hosts(64 - count, GBIT, False, True), Hosts(count, r, False, True)],
                NBYTES,
                NETWORK,
            )
            for r in rates
        ]
        slow.plot(
            rates,
            [shared(one) for one in found],
            marker="o",
            markersize=3,
            color=colour,
            label=f"{count} of 64 servers",
        )
    slow.set(
        xlabel="Gbit/s of the slow servers",
        ylabel="goodput / line rate",
        title="Slow servers, 64 workers of 400 Gbit/s",
    )

    for window, colour in zip((2, 4, 8), COLOURS, strict=False):
        protocol = Protocol(window=window, server_loops=4)
        gib = [simulate(separate(n, max(n // 8, 1)), NBYTES, protocol).server_memory / 2**30 for n in counts]
        memory.plot(counts, gib, marker="o", markersize=3, color=colour, label=f"BPS_SERVER_WINDOW={window}")
    memory.set(
        xscale="log",
        yscale="log",
        xlabel="workers",
        ylabel="GiB on one server",
        title="Landing slots, 4 loops, pieces of 512 KiB",
    )

    for axis in (times, servers_needed, slow, memory):
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

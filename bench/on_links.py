# SPDX-License-Identifier: Apache-2.0
r"""Runs a command as the ranks of a job whose hosts have links of a limited rate (the lab of link_lab.py).

    sudo .venv/bin/python bench/on_links.py --workers 2 --rate 400 python examples/train.py --epochs 1

What each step of Megatron's overlap gains (docs/megatron.md):

    sudo .venv/bin/python bench/on_links.py --workers 2 --rate 400 python examples/megatron/compare.py \
        --distributed-optimizer --kinds stock,steps-none,steps-a,steps-ab,steps-abc

Each host has one rank, whose variables are as torchrun and `bps run` set them. Needs root to create network namespaces,
and removes them at the end.
"""

from __future__ import annotations

import argparse
import os
import sys

from link_lab import lab

from bps_rdma.launch.run import run_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="hosts, with a rank each")
    parser.add_argument("--servers", type=int, default=0, help="spare hosts, with a server each")
    parser.add_argument("--rate", type=float, default=400, help="rate of every link in Mbit/s, in each direction")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("name the command that each rank runs")
    if os.geteuid() != 0:
        sys.exit("error: creating network namespaces needs root\nhint: use sudo, or a container with CAP_SYS_ADMIN")
    with lab([args.rate] * args.workers, 1, [args.rate] * args.servers, 0) as (_, job):
        status = run_job(job, args.command)
    sys.exit(status)


if __name__ == "__main__":
    main()

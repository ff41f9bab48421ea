# SPDX-License-Identifier: Apache-2.0
"""One training script for a machine and for a Ray cluster. It trains a small GPT of Megatron's, without a GPU.

    torchrun --nproc-per-node 4 examples/ray/train.py --tp 2
    bps run -np 4 examples/ray/train.py --tp 2
    python examples/ray/train.py --mode ray --hosts 2 --per-host 2 --tp 2 --servers 1 --max-failures 3

All of them train the same model to the same losses. With --checkpoints, each goes on where any of them has stopped;
the folder must be one that all hosts see.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import training


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_mode(parser)
    training.common.add_options(parser)
    parser.add_argument("--steps", type=int, default=10, help="steps of training (default: %(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save every step there, and resume")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, norms and digests of the weights")
    options = parser.parse_args()
    if options.checkpoints:
        options.checkpoints = options.checkpoints.resolve()  # ranks on Ray have a current folder of their own
    outcome = start(training.train, options)
    if options.json and outcome is not None:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where ranks come from."""
    parser.add_argument(
        "--mode", choices=["local", "ray"], default="local", help="local: torchrun or bps run starts us"
    )
    ray = parser.add_argument_group("with --mode ray")
    ray.add_argument("--hosts", type=int, default=1, help="groups of ranks that share a node")
    ray.add_argument("--per-host", type=int, default=1, help="ranks per group")
    ray.add_argument("--cpus", type=float, default=1, help="of each rank; may be less than 1")
    ray.add_argument("--gpus", type=float, default=0, help="of each rank")
    ray.add_argument("--servers", type=int, default=0, help="dedicated servers; default: the ranks are servers, too")
    ray.add_argument("--max-failures", type=int, default=0, help="how often to go on from the last checkpoint")


def start(train: Callable[[argparse.Namespace], Any], options: argparse.Namespace) -> Any:
    """Call train(options) as this rank, or as all ranks on Ray; what rank 0 returns, or None on the others."""
    if options.mode == "local":
        outcome = train(options)
        return outcome if os.environ["RANK"] == "0" else None
    import bps_rdma.ray

    # Modules of this example lie in folders that all hosts see, not in an installed package.
    paths = [str(Path(__file__).resolve().parent), str(training.MEGATRON), os.environ.get("PYTHONPATH", "")]
    return bps_rdma.ray.run(
        train, options, hosts=options.hosts, per_host=options.per_host, servers=options.servers,
        rank_resources={"CPU": options.cpus, "GPU": options.gpus},
        server_resources={"CPU": options.cpus}, max_failures=options.max_failures,
        env={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )[0]  # fmt: skip


if __name__ == "__main__":
    main()

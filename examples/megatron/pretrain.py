# SPDX-License-Identifier: Apache-2.0
"""Pretrains a small GPT on Megatron's own training loop, without a GPU, on generated data.

    torchrun --nproc-per-node 2 examples/megatron/pretrain.py --use-bps
    torchrun --nproc-per-node 8 examples/megatron/pretrain.py --tp 2 --pp 2 --use-bps

With --checkpoints, the same command resumes an interrupted training. Without a flag of bps_rdma this is stock Megatron
over gloo. compare.py compares both.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import checkpoint
from common import add_options, of_the_last, ranks, say, setup_of, slowest
from gpt import Training

from bps_rdma import megatron
from bps_rdma.megatron.communicator import counts


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=10, help="steps of training (default: %(default)s)")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save every step there, and resume from the last one",
    )
    options = megatron.add_flags(parser).parse_args()
    with ranks(options):
        with megatron.enabled(options):
            training = Training(setup_of(options))
        taken = checkpoint.load(training, options.checkpoints) if options.checkpoints else 0
        for number in range(taken, options.steps):
            training.step()
            if options.checkpoints:
                checkpoint.save(training, options.checkpoints)
            (loss,) = of_the_last(training.losses[-1:])
            say(f"step {number + 1}: loss {loss:.5f}, norm {training.norms[-1]:.4f}")
        if counted := slowest(training.seconds[2:]):
            say(f"{1e3 * statistics.median(counted):.1f} ms per step, without the first two")
        say(f"{sum(counts.values())} buckets over bps_rdma")
        training.close()


if __name__ == "__main__":
    main()

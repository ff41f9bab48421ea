# SPDX-License-Identifier: Apache-2.0
"""What every rank does, however it was started: trains a small GPT of Megatron's, with checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

MEGATRON = Path(__file__).resolve().parents[1] / "megatron"
sys.path.insert(0, str(MEGATRON))  # the model and its data are those of that example

import checkpoint  # noqa: E402
import common  # noqa: E402
from gpt import Training  # noqa: E402

from bps_rdma import megatron  # noqa: E402


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train as the rank that the environment describes; returns losses, norms and a digest of this rank's weights."""
    with common.ranks(options):
        with megatron.enabled(use_dpu_reduce=True):
            training = Training(common.setup_of(options))
        taken = checkpoint.load(training, options.checkpoints) if options.checkpoints else 0
        for number in range(taken, options.steps):
            training.step()
            if options.checkpoints:
                checkpoint.save(training, options.checkpoints)
            (loss,) = common.of_the_last(training.losses[-1:])
            common.say(f"step {number + 1}: loss {loss:.5f}, norm {training.norms[-1]:.4f}")
        result = training.result()
        outcome = {
            "first": taken,
            "losses": common.of_the_last(result.losses),
            "norms": result.norms,
            "weights": common.of_all_ranks(result.weights),
            "seconds": common.slowest(result.seconds),
        }
        training.close()
    return outcome

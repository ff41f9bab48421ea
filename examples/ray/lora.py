# SPDX-License-Identifier: Apache-2.0
"""Trains LoRA adapters beside a frozen GPT of Megatron's, saves them alone, and merges them at the end.

    torchrun --nproc-per-node 4 examples/ray/lora.py --tp 2 --pp 2 --recompute --adapters adapters.pt
    python examples/ray/lora.py --mode ray --per-host 4 --tp 2 --pp 2 --recompute --adapters adapters.pt

The same command goes on from the adapters that it finds, at any --tp and --pp. The pretrained weights, which a real
training would load before add_lora(), are random here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import train as script
import training
from training import common

from bps_rdma import megatron
from bps_rdma.megatron.lora_layers import TARGETS


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    script.add_mode(parser)
    common.add_options(parser)
    parser.add_argument("--steps", type=int, default=10, help="steps of training (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--alpha", type=float, default=16, help="scales them, divided by --rank (default: %(default)s)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="linear layers with adapters (default: all)")
    parser.add_argument("--sequence-parallel", action="store_true", help="with --tp")
    parser.add_argument("--recompute", action="store_true", help="all activations, instead of keeping them")
    parser.add_argument("--adapters", type=Path, metavar="FILE", help="load them from there if it exists; save them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and norms")
    options = parser.parse_args()
    if options.adapters:
        options.adapters = options.adapters.resolve()
    outcome = script.start(fine_tune, options)
    if options.json and outcome is not None:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def fine_tune(options: argparse.Namespace) -> dict[str, Any]:
    """Train as the rank that the environment describes."""
    with common.ranks(options):
        setup = dataclasses.replace(
            common.setup_of(options), sp=options.sequence_parallel, recompute=options.recompute, shared_embeddings=False
        )
        with megatron.enabled(use_dpu_reduce=True):
            model = training.Training(setup, lambda chunk: add(chunk, options))
        loaded = bool(options.adapters and options.adapters.exists())
        if loaded:
            megatron.load_lora(model.model, options.adapters)
            model.optimizer.reload_model_params()
        for number in range(options.steps):
            model.step()
            (loss,) = common.of_the_last(model.losses[-1:])
            common.say(f"step {number + 1}: loss {loss:.5f}, norm {model.norms[-1]:.4f}")
        trained = sum(bool(adapter.b.any()) for adapter in megatron.adapters(model.model))
        outcome = {
            "loaded": loaded,
            "losses": common.of_the_last(model.losses),
            "norms": model.norms,
            "trained": common.of_all_ranks(trained),  # adapters of each rank
        }
        if options.adapters:
            megatron.save_lora(model.model, options.adapters)
        merged = megatron.merge_lora(model.model)
        common.say(f"{trained} of {merged} adapters of rank 0 trained, and merged into the weights")
        model.close()
    return outcome


def add(chunk: Any, options: argparse.Namespace) -> None:
    """Add the adapters to a chunk of the model."""
    megatron.add_lora(chunk, options.rank, options.alpha, options.targets.split(","))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Compares stock Megatron with bps_rdma: trains one model with each in turns, and without sending gradients.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/megatron/compare.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 examples/megatron/compare.py --tp 2 --pp 2 --overlap --plot steps.png

    ... compare.py --distributed-optimizer --kinds stock,steps-none,steps-a,steps-ab,steps-abc    # overlap by steps

All kinds start from the same weights and take the same steps. In every round each kind takes a turn, whose first step
is not counted. The kind "alone" never sends a gradient; the others take longer by the exposed communication.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import add_options, of_all_ranks, of_the_last, ranks, setup_of, slowest
from figures import ALONE, STOCK, Outcome, save_plot, show, to_json
from gpt import Setup, Training

from bps_rdma import extras, megatron
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.outputs import check_outputs

KINDS = {  # name -> flags
    STOCK: {},
    "dpu-reduce": {"use_dpu_reduce": True},
    "dpu-reduce+tp": {"use_dpu_reduce": True, "use_dpu_tp_reduce": True},
}
# What overlaps more and more with computation, whatever --overlap says: name -> how the setup differs. Step a:
# gradients travel behind backward. Step b: parameters are gathered behind forward. Step c: attention's projections are
# gathered in the order of their use, not in that of Megatron's registration.
STEPS: dict[str, dict[str, bool]] = {
    "steps-none": {"overlap": False, "overlap_gather": False},
    "steps-a": {"overlap": True, "overlap_gather": False},
    "steps-ab": {"overlap": True, "overlap_gather": True, "in_order": False},
    "steps-abc": {"overlap": True, "overlap_gather": True, "in_order": True},
}
KINDS |= {kind: {"use_dpu_reduce": True} for kind in STEPS}
_UNCOUNTED = 1  # steps at the start of a turn, when the caches hold data of another kind
_FIRST = 3  # in the first round, when bucket groups learn their order and memory is new


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--kinds",
        default=f"{STOCK},dpu-reduce",
        help=f"comma-separated, of {','.join(KINDS)} (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps per turn (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all results to this file; - for stdout")
    parser.add_argument("--plot", metavar="FILE", help="plot the times of steps into this file (png, svg, pdf)")
    options = parser.parse_args()
    with ranks(options):
        kinds = _kinds_of(options)
        setup = setup_of(options)
        with contextlib.redirect_stdout(sys.stderr):  # Megatron prints to stdout, which may have to hold only JSON
            outcome = compare(setup, kinds, options.rounds, options.steps)
        if dist.get_rank() == 0:
            _report(outcome, options.json, options.plot)


def _kinds_of(options: argparse.Namespace) -> list[str]:
    kinds: list[str] = list(dict.fromkeys(options.kinds.split(",")))
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidArgumentError(f"unknown kind {kind!r}", f"use some of {', '.join(KINDS)}")
    if STOCK not in kinds:
        raise InvalidArgumentError(f"--kinds {options.kinds} lacks {STOCK!r}", "add it as the baseline")
    if not options.distributed_optimizer and (steps := STEPS.keys() & kinds):
        raise InvalidArgumentError(
            f"{min(steps)!r} is a step of the distributed optimizer's overlap", "add --distributed-optimizer"
        )
    if options.rounds < 1 or options.steps < 1:
        raise InvalidArgumentError("--rounds and --steps must be positive", "give at least 1")
    if dist.get_world_size() == options.tp * options.pp:
        raise InvalidArgumentError(
            "the data-parallel size is 1, so no gradient is sent",
            f"start {2 * options.tp * options.pp} ranks, or reduce --tp or --pp",
        )
    json_file, plot = (Path(file) if file and file != "-" else None for file in (options.json, options.plot))
    check_outputs(json_file, plot)
    if options.plot and not extras.is_installed("matplotlib"):
        raise InvalidArgumentError(
            "matplotlib, which --plot needs, is not installed", extras.install_command("matplotlib")
        )
    return kinds


def _report(outcome: Outcome, json_file: str | None, plot: str | None) -> None:
    if json_file == "-":
        json.dump(to_json(outcome), sys.stdout)
        print()
    else:
        show(outcome)
    if json_file and json_file != "-":
        Path(json_file).write_text(json.dumps(to_json(outcome), indent=1) + "\n", encoding="utf-8")
    if plot:
        save_plot(outcome, plot)


def compare(setup: Setup, kinds: list[str], rounds: int, steps: int) -> Outcome:
    """Run all rounds. Each starts with another kind, so that no kind always follows the same one."""
    trainings = {kind: _training(setup, kind) for kind in [ALONE, *kinds]}
    order = list(trainings)
    turns: dict[str, list[list[float]]] = {kind: [] for kind in order}
    for number in range(rounds):
        first = number % len(order)
        for kind in order[first:] + order[:first]:
            _progress(f"round {number + 1} of {rounds}: {kind}")
            turns[kind].append(_turn(trainings[kind], steps, _UNCOUNTED if number else _FIRST))
    _progress("")
    return _outcome(setup, trainings, turns)


def _training(setup: Setup, kind: str) -> Training:
    with megatron.enabled(**{"use_dpu_reduce": False, **KINDS.get(kind, {})}):
        training = Training(replace(setup, **STEPS.get(kind, {})))
    if kind == ALONE:
        _silence(training)
    return training


def _turn(training: Training, steps: int, uncounted: int) -> list[float]:
    training.activate()
    gc.collect()
    for number in range(uncounted + steps):
        if number == uncounted:
            dist.barrier()
        training.step()
    return slowest(training.seconds[-steps:])


def _outcome(setup: Setup, trainings: dict[str, Training], turns: dict[str, list[list[float]]]) -> Outcome:
    results = {}
    for kind, training in trainings.items():
        training.activate()
        results[kind] = training.result()
    same = {
        kind: all(of_all_ranks(result == results[STOCK]))
        for kind, result in results.items()
        if kind not in (ALONE, STOCK)
    }
    losses = {kind: of_the_last(result.losses) for kind, result in results.items() if kind != ALONE}
    norms = {kind: result.norms for kind, result in results.items() if kind != ALONE}
    parts = setup.tp * setup.pp
    replicas = dist.get_world_size() // parts
    parameters = sum(of_all_ranks(sum(p.numel() for c in trainings[STOCK].model for p in c.parameters()))) // replicas
    return Outcome(setup, dist.get_world_size(), parameters, turns, losses, norms, same)


class _SilentGroup:
    """Replaces a communication group: its collectives complete at once and send nothing."""

    def __init__(self, stock: Any) -> None:
        self.rank, self.size, self.name = stock.rank, stock.size, stock.name

    def allreduce_coalesced(self, *_: Any) -> Any:
        return self

    reduce_scatter_single_coalesced = all_gather_single_coalesced = allreduce_coalesced
    reduce_scatter_tensor_coalesced = allgather_into_tensor_coalesced = allreduce_coalesced

    def wait(self, *_: Any) -> bool:
        return True


def _silence(training: Training) -> None:
    """Send no gradients, but keep the ranks in step: ranks that drift apart compete less for memory and are faster."""
    for chunk in training.model:
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            for name, value in list(vars(bucket_group).items()):
                if isinstance(value, dist.ProcessGroup):
                    setattr(bucket_group, name, _SilentGroup(value))
    finish = training.config.finalize_model_grads_func

    def wait_and_finish(*args: Any, **options: Any) -> Any:
        dist.barrier()
        return finish(*args, **options)

    training.config.finalize_model_grads_func = wait_and_finish


def _progress(text: str) -> None:
    if dist.get_rank() == 0 and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Pretrains a small GPT on Megatron's own loop, without a GPU, on words that are made here.

    torchrun --nproc-per-node 2 examples/megatron/pretrain.py --use-dpu-reduce
    torchrun --nproc-per-node 8 examples/megatron/pretrain.py --tp 2 --pp 2 --use-dpu-reduce
    torchrun --nproc-per-node 2 examples/megatron/pretrain.py --compare

Tensor and pipeline parallelism communicate by gloo here, data parallelism by bps_rdma. --compare trains without and
with the flag, in turns, and says whether losses, norms and weights are the same, and what a step takes.
"""

from __future__ import annotations

import argparse
import statistics

import cpu
import torch
import torch.distributed as dist
from gpt import Setup, Trained, train

import bps_rdma.torch as bps
from bps_rdma import megatron


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("hidden", 256, "width of the model"),
        ("layers", 4, "layers of the model"),
        ("words", 8192, "size of the vocabulary"),
        ("length", 64, "words of a sample"),
        ("steps", 10, "steps of training"),
        ("microbatches", 1, "microbatches of a step"),
        ("tp", 1, "ranks of tensor parallelism"),
        ("pp", 1, "stages of the pipeline"),
        ("rounds", 3, "with --compare: trainings of each kind"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--overlap", action="store_true", help="send gradients during backward")
    parser.add_argument("--distributed-optimizer", action="store_true", help="shard the optimizer's state")
    parser.add_argument("--compare", action="store_true", help="without and with --use-dpu-reduce, in turns")
    return megatron.add_flags(parser).parse_args()


def main() -> None:
    """Trains once, or several times to compare."""
    options = parse_arguments()
    cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    setup = Setup(
        hidden=options.hidden, layers=options.layers, heads=8, words=options.words, length=options.length, samples=1,
        bucket=2_000_000, tp=options.tp, pp=options.pp, microbatches=options.microbatches, steps=options.steps,
        overlap=options.overlap, distributed_optimizer=options.distributed_optimizer,
        overlap_gather=options.overlap and options.distributed_optimizer,
    )  # fmt: skip
    if options.compare:
        compare(setup, options.rounds)
    else:
        with megatron.enabled(options):
            trained = train(setup)
        for step, loss in enumerate(everybody(trained.losses)):
            say(f"step {step + 1}: loss {loss:.5f}, norm {trained.norms[step]:.4f}")
        say(f"{milliseconds(trained):.1f} ms per step")
    if bps.is_initialized():
        bps.shutdown()
    dist.destroy_process_group()


def compare(setup: Setup, rounds: int) -> None:
    """Trains in turns, so that whatever else this machine does meets both kinds."""
    times: dict[bool, list[float]] = {False: [], True: []}
    results: dict[bool, Trained] = {}
    for number in range(rounds):
        for ours in (False, True) if number % 2 == 0 else (True, False):
            with megatron.enabled(use_dpu_reduce=ours):
                results[ours] = train(setup)
            times[ours].append(milliseconds(results[ours]))
            say(f"{'bps_rdma' if ours else 'stock'}: {times[ours][-1]:.1f} ms per step")
    for step, (stock, ours) in enumerate(
        zip(everybody(results[False].losses), everybody(results[True].losses), strict=True)
    ):
        say(f"step {step + 1}: loss {stock:.7f} stock, {ours:.7f} bps_rdma")
    same = min(everybody([float(results[False] == results[True])]))
    say(f"losses, norms and weights are {'the same, bit for bit' if same else 'not the same bits'}")
    ratios = [stock / ours for stock, ours in zip(times[False], times[True], strict=True)]
    say(f"stock / bps_rdma: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def milliseconds(trained: Trained) -> float:
    """Of a step, the first two left out, on the slowest rank."""
    return 1e3 * max(everybody([statistics.median(trained.seconds[2:])]))


def everybody(values: list[float]) -> list[float]:
    """The values of the last rank that has some, of one value that of every rank."""
    found: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, values)
    return [one for each in found for one in each] if len(values) == 1 else next(each for each in found[::-1] if each)


def say(text: str) -> None:
    """Print it once, not once per rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

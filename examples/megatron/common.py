# SPDX-License-Identifier: Apache-2.0
"""Shared by the scripts of this folder: options of the model and of parallelism, set-up, and suppressed warnings."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import cpu
import torch
import torch.distributed as dist
from gpt import Setup

import bps_rdma
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.terminal import print_error

_SIZES = (
    ("hidden", 512, "width of the model"),
    ("layers", 6, "layers of the model"),
    ("heads", 8, "attention heads"),
    ("words", 16384, "size of the vocabulary"),
    ("length", 64, "tokens per sample"),
    ("samples", 1, "samples per microbatch"),
    ("microbatches", 1, "microbatches per step"),
    ("bucket", 2_000_000, "elements per bucket of gradients, with --overlap"),
    ("tp", 1, "ranks of tensor parallelism"),
    ("pp", 1, "pipeline stages"),
    ("cp", 1, "ranks of context parallelism, which share a sequence"),
)
# Warnings of Megatron in every process without a GPU, without its optional libraries, or with a newer torch.
_EXPECTED = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"full scope is deprecated",
    r"When using async grad allreduce it is recommended to set",
    r"`torch.distributed.reduce_scatter_tensor` is deprecated",
    r"`torch.distributed.all_gather_into_tensor` is deprecated",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes of the model and for parallelism."""
    for name, default, text in _SIZES:
        parser.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--overlap", action="store_true", help="communicate during backward and forward")
    parser.add_argument("--distributed-optimizer", action="store_true", help="shard the optimizer's state")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of torch per rank (default: 1)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def setup_of(options: argparse.Namespace) -> Setup:
    """The configuration of the options.

    Raises:
        InvalidArgumentError: the model or the ranks cannot be divided in this way.
    """
    ranks, parts = dist.get_world_size(), options.tp * options.pp * options.cp
    divisor = "--tp times --pp" + (" times --cp" if options.cp > 1 else "")
    for what, whole, part, name in (
        (f"{ranks} ranks", ranks, parts, divisor),
        ("--hidden", options.hidden, options.heads, "--heads"),
        ("--heads", options.heads, options.tp, "--tp"),
        ("--words", options.words, options.tp, "--tp"),
        ("--layers", options.layers, options.pp, "--pp"),
        ("--length", options.length, 2 * options.cp if options.cp > 1 else 1, "twice --cp"),
    ):
        if whole % part:
            raise InvalidArgumentError(
                f"{what if what.endswith('ranks') else f'{what} {whole}'} cannot be divided by {name}, which is {part}",
                f"use a multiple of {part}" + (" for torchrun's --nproc-per-node" if whole == ranks else ""),
            )
    return Setup(
        **{name: getattr(options, name) for name, _, _ in _SIZES},
        overlap=options.overlap,
        distributed_optimizer=options.distributed_optimizer,
        overlap_gather=options.overlap and options.distributed_optimizer,
    )


@contextlib.contextmanager
def ranks(options: argparse.Namespace) -> Iterator[None]:
    """Set up and end the process groups of all ranks; a user's mistake ends the process without a traceback."""
    try:
        if not os.environ.get("RANK"):
            raise InvalidArgumentError(
                "this process is not a rank of a job: RANK is not set",
                f"start it with torchrun: `torchrun --nproc-per-node 2 {sys.argv[0]} ...`",
            )
        for text in _EXPECTED:
            warnings.filterwarnings("ignore", message=text)
        if torch.cuda.is_available():
            _use_gpu()
        else:
            cpu.install()
        torch.set_num_threads(options.threads)
        if _alone():  # otherwise gloo resolves the host name, which may fail
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
        yield
        bps_rdma.shutdown()
        dist.destroy_process_group()
    except BpsError as error:
        # A wrong command line is the same on all ranks. Other errors name peers, and differ.
        if isinstance(error, InvalidArgumentError) and os.environ.get("RANK", "0") != "0":
            time.sleep(1)  # torchrun stops all ranks when one fails; rank 0 has to print its error first
        else:
            print_error(error.message, error.hint)
        sys.exit(1)


def _use_gpu() -> None:
    """Choose a GPU. Ranks may share it, because all groups use gloo; NCCL needs one GPU per rank."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _alone() -> bool:
    """Whether all ranks are on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def of_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_the_last(values: list[float]) -> list[float]:
    """The values of the last rank that has some: only the last pipeline stage knows the losses."""
    return next((found for found in reversed(of_all_ranks(values)) if found), [])


def slowest(seconds: list[float]) -> list[float]:
    """For each step, the time of the slowest rank."""
    return [max(step) for step in zip(*of_all_ranks(seconds), strict=True)]


def say(text: str) -> None:
    """Print once, on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)

"""Who is compared. Each wraps the same module for one turn; what it leaves on the module goes with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bps_rdma
from bps_rdma.torch.ddp import DistributedDataParallel
from bps_rdma.torch.plan import STRATEGIES
from bps_rdma.torch.transfer import mapped

ALONE = "alone"  # backward and step, and no gradient is sent: what a step costs by itself
KINDS = (*STRATEGIES, "ddp-gloo", "ddp-bps")
BUCKETED = ("bucketed", "ddp-gloo", "ddp-bps")  # have buckets of a size
SYNCS = {"gloo": "sync-gloo", "bps": "sync-bps"}  # only sends as much as all gradients, in one call


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        kind: ALONE, one of KINDS, or one of SYNCS.
        bucket_mb: size of buckets, 2^20 bytes; 0 where there are none.
    """

    kind: str
    bucket_mb: float = 0.0

    @property
    def label(self) -> str:
        """For tables and plots."""
        return f"{self.kind} {self.bucket_mb:g} MB" if self.bucket_mb else self.kind

    @property
    def backend(self) -> str:
        """What carries the gradients."""
        return "gloo" if self.kind.endswith("gloo") else "bps"


def contenders_of(kinds: tuple[str, ...], buckets: tuple[float, ...]) -> list[Contender]:
    """ALONE first, then each kind, those with buckets once per size, then the bare transfers."""
    found = [Contender(ALONE)]
    for kind in kinds:
        found += [Contender(kind, size) for size in buckets] if kind in BUCKETED else [Contender(kind)]
    return found + [Contender(SYNCS[backend]) for backend in sorted({one.backend for one in found[1:]})]


def step_of(contender: Contender, model: nn.Module, batch: torch.Tensor, groups: dict[str, Any]) -> Callable[[], None]:
    """A function that takes one step of training, or sends what one step would."""
    if contender.kind in SYNCS.values():
        return _transfer(contender, model, groups)
    wrapped = _wrap(contender, model, groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    alone = contender.kind == ALONE

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).backward()
        if alone:
            # Ranks that wait for each other compute at the same time, and contend for memory; those that do not would
            # drift apart, and be faster for that.
            dist.barrier()
        optimizer.step()

    return step


def _wrap(contender: Contender, model: nn.Module, groups: dict[str, Any]) -> nn.Module:
    if contender.kind == ALONE:
        return model
    if contender.kind in STRATEGIES:
        return DistributedDataParallel(model, strategy=contender.kind, bucket_mb=contender.bucket_mb or 25.0)
    return nn.parallel.DistributedDataParallel(
        model,
        process_group=groups[contender.backend],
        bucket_cap_mb=contender.bucket_mb,
        gradient_as_bucket_view=True,
    )


def _transfer(contender: Contender, model: nn.Module, groups: dict[str, Any]) -> Callable[[], None]:
    count = sum(p.numel() for p in model.parameters())
    if contender.backend == "gloo":
        plain = torch.zeros(count)
        return lambda: dist.all_reduce(plain, group=groups["gloo"])
    shared = mapped(count, torch.float32)

    def push_pull() -> None:
        bps_rdma.push_pull_inplace(shared, name="compare.transfer")

    return push_pull

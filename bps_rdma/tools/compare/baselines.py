# SPDX-License-Identifier: Apache-2.0
"""The methods that are compared: strategies of bps_rdma, and torch's DDP as baseline. Each wraps the same module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from bps_rdma.torch.ddp import DistributedDataParallel
from bps_rdma.torch.ops import push_pull_inplace
from bps_rdma.torch.plan import STRATEGIES, StrategyName
from bps_rdma.torch.sharded import ShardedOptimizer
from bps_rdma.torch.transfer import zeros_beside

ALONE = "alone"  # backward and step without sending gradients: the cost of a step by itself
USUAL = (*STRATEGIES, "ddp-gloo", "ddp-bps")
SHARDED = "sharded"  # buckets, and each rank keeps a part of the optimizer's state
KINDS = (*USUAL, SHARDED)
BUCKETED = ("bucketed", "ddp-gloo", "ddp-bps", SHARDED)  # take a bucket size
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
}
SYNCS = {"gloo": "sync-gloo", "bps": "sync-bps"}  # only sends as many bytes as all gradients have, in one call


@dataclass(frozen=True)
class TrainingMethod:
    """One way to train.

    Attributes:
        kind: ALONE, one of KINDS, or one of SYNCS.
        bucket_mb: bucket size in units of 2^20 bytes; 0 for methods without buckets.
    """

    kind: str
    bucket_mb: float = 0.0

    @property
    def label(self) -> str:
        """The name of the method in tables and plots."""
        return f"{self.kind} {self.bucket_mb:g} MB" if self.bucket_mb else self.kind

    @property
    def backend(self) -> str:
        """The library that carries the gradients."""
        return "gloo" if self.kind.endswith("gloo") else "bps"


def methods_of(kinds: tuple[str, ...], buckets: tuple[float, ...]) -> list[TrainingMethod]:
    """ALONE first, then each kind (kinds with buckets once per size), then the plain transfers."""
    found = [TrainingMethod(ALONE)]
    for kind in kinds:
        found += [TrainingMethod(kind, size) for size in buckets] if kind in BUCKETED else [TrainingMethod(kind)]
    return found + [TrainingMethod(SYNCS[backend]) for backend in sorted({one.backend for one in found[1:]})]


@dataclass(frozen=True)
class Training:
    """One training of one method.

    Attributes:
        step: takes one training step, or only sends as many bytes as one step.
        optimizer: of the training; None where nothing is trained.
    """

    step: Callable[[], None]
    optimizer: torch.optim.Optimizer | None = None


def training_of(
    method: TrainingMethod, model: nn.Module, batch: torch.Tensor, groups: dict[str, Any], optimizer_name: str
) -> Training:
    """Wraps the model as the method says, with one of OPTIMIZERS."""
    if method.kind in SYNCS.values():
        return Training(_transfer(method, model, groups))
    wrapped = _wrap(method, model, groups)
    kind, settings = OPTIMIZERS[optimizer_name]
    if method.kind == SHARDED:
        optimizer: torch.optim.Optimizer = ShardedOptimizer(model.parameters(), kind, **settings)
    else:
        optimizer = kind(model.parameters(), **settings)
    alone = method.kind == ALONE

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).backward()
        if alone:
            # Ranks that wait for each other compute at the same time and compete for memory. Without a barrier they
            # would drift apart and be faster.
            if batch.is_cuda:
                torch.cuda.synchronize()
            dist.barrier()
        optimizer.step()

    return Training(step, optimizer)


def _wrap(method: TrainingMethod, model: nn.Module, groups: dict[str, Any]) -> nn.Module:
    if method.kind == ALONE:
        return model
    if method.kind in (*STRATEGIES, SHARDED):
        strategy = "bucketed" if method.kind == SHARDED else method.kind
        return DistributedDataParallel(model, strategy=cast(StrategyName, strategy), bucket_mb=method.bucket_mb or 25.0)
    return nn.parallel.DistributedDataParallel(
        model,
        process_group=groups[method.backend],
        bucket_cap_mb=method.bucket_mb,
        gradient_as_bucket_view=True,
    )


def _transfer(method: TrainingMethod, model: nn.Module, groups: dict[str, Any]) -> Callable[[], None]:
    count = sum(p.numel() for p in model.parameters())
    if method.backend == "gloo":
        plain = torch.zeros(count)
        return lambda: dist.all_reduce(plain, group=groups["gloo"])
    shared = zeros_beside(next(model.parameters()), count, torch.float32)

    def push_pull() -> None:
        push_pull_inplace(shared, name="compare.transfer")

    return push_pull

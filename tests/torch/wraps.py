# SPDX-License-Identifier: Apache-2.0
"""All ways of averaging gradients here that a script may train with, and training alone."""

from collections.abc import Callable
from typing import Any

import torch
from strategies import STRATEGIES
from torch import nn

from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer, ShardedOptimizer


def wraps(bps: Any) -> dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]]:
    """By name: what makes (the module to call, its optimizer) of a model."""

    def optimizer(strategy: str) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
        def wrap(model: nn.Module) -> tuple[nn.Module, Any]:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, DistributedOptimizer(sgd, model.named_parameters(), strategy=strategy, bucket_mb=0.001)

        return wrap

    def ddp(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(model, bucket_mb=0.001)
        return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)

    def sharded(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(model, strategy="overlap")
        return wrapped, ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    return {**{name: optimizer(name) for name in STRATEGIES}, "ddp": ddp, "sharded": sharded}


def plain(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# SPDX-License-Identifier: Apache-2.0
"""A function of the script's own gives a parameter no gradient in some backwards: torch's DDP takes it as zeros."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from torch import nn

from bps_rdma.errors import BpsError
from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer

SKIPS = [(1, 1), (0, 1), (0, 0)]  # by step and rank: whether the weight gets no gradient there


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, skips: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.skips = skips
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), None if ctx.skips else x.t() @ gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.weight = nn.Parameter(torch.full((4, 2), 0.5))
        nn.init.constant_(self.first.weight, 0.25)

    def forward(self, x: torch.Tensor, skips: bool) -> Any:
        return Product.apply(self.first(x), self.weight, skips)


def expected(ranks: int) -> Model:
    """One process computes what each rank does, and averages; no gradient counts as zeros."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for skips in SKIPS:
        optimizer.zero_grad(set_to_none=False)
        for rank in range(ranks):
            (model(torch.full((1, 4), 1.0 + rank), bool(skips[rank])).sum() / ranks).backward()
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["bucketed", "flat", "overlap", "naive", "optimizer", "barrier"])
@harness.on_ranks()
def test_no_gradient_counts_as_zeros(bps, kind):
    model: Any = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    wrapped = model
    if kind == "optimizer":
        optimizer = DistributedOptimizer(optimizer, model.named_parameters())
    elif kind == "barrier":
        optimizer = CrossBarrier(model, optimizer)
    else:
        wrapped = DistributedDataParallel(model, strategy=kind)
    for skips in SKIPS:
        optimizer.zero_grad()
        wrapped(torch.full((1, 4), 1.0 + bps.rank()), bool(skips[bps.rank()])).sum().backward()
        optimizer.step()
    if kind == "barrier":
        optimizer.synchronize()
    for found, wanted in zip(model.parameters(), expected(2).parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@harness.on_ranks()
def test_a_gradient_that_a_hook_of_the_script_has_dropped_is_missed(bps):
    model: Any = Model()
    model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    wrapped = DistributedDataParallel(model)
    with pytest.raises(BpsError, match="the gradient of 'weight' was dropped in a hook"):
        wrapped(torch.ones(1, 4), False).sum().backward()

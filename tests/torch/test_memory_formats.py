# SPDX-License-Identifier: Apache-2.0
"""Parameters that lie in another order in memory on some ranks only: the right elements are averaged."""

from collections.abc import Callable
from typing import Any

import harness
import torch
import training
from torch import nn
from wraps import plain, wraps

from bps_rdma.torch import DistributedDataParallel


def train(bps: Any, model: nn.Module, optimizer: Any, between: Callable[[int], None] = lambda _: None) -> None:
    for step in range(4):
        training.make_step(model, optimizer, training.share_of(bps, step))
        between(step)


def images() -> nn.Module:
    """Without statistics, which a rank would have of its own samples."""
    model = training.seeded(training.Images)
    model.norm = nn.Identity()
    return model


def trained_alone() -> nn.Module:
    model = images()
    training.train_alone(*plain(model), 4)
    return model


@harness.on_ranks(workers=2)
def test_some_ranks_have_another_one(bps: Any) -> None:
    alone = trained_alone()
    for name, wrap in wraps(bps).items():
        model = images()
        if bps.rank() == 1:
            model.to(memory_format=torch.contiguous_format)
        train(bps, *wrap(model))
        assert training.distance(alone, model) < 1e-5, name
        assert training.same_everywhere(bps, model), name


@harness.on_ranks(workers=2)
def test_a_rank_gets_another_one_later(bps: Any) -> None:
    """Its buckets get other memory as well, because a gradient is kept."""
    alone = trained_alone()
    model = images()
    ddp, optimizer = DistributedDataParallel(model), plain(model)[1]
    kept = []

    def change(step: int) -> None:
        if bps.rank() == 1 and step == 2:
            model.to(memory_format=torch.contiguous_format)
            kept.append(model.convolution.weight.grad)

    train(bps, ddp, optimizer, change)
    assert training.distance(alone, model) < 1e-5
    assert training.same_everywhere(bps, model)

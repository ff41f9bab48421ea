# SPDX-License-Identifier: Apache-2.0
"""Compiled autograd, which does not say when a backward ends, is refused: `.grad` would be that of one rank."""

from typing import Any

import harness
import pytest
import torch
import training
from torch import nn

from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer


@harness.on_ranks(workers=2)
def test_compiled_autograd_is_refused(bps: Any) -> None:
    from torch._dynamo import compiled_autograd

    def train(model: nn.Module, ours: nn.Module, optimizer: Any) -> None:
        inputs = torch.full((2, 8), 2.0 * bps.rank() + 1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(inputs).sum()
            with (
                compiled_autograd._enable(torch.compile(backend="eager")),
                pytest.raises(bps.BpsError, match="compiled autograd"),
            ):
                loss.backward()
        optimizer.zero_grad()
        model(inputs).sum().backward()  # goes on as ever
        for parameter in ours.parameters():
            assert torch.equal(parameter.grad, torch.full((1, 8), 4.0))

    model = training.seeded(lambda: nn.Linear(8, 1, bias=False))
    train(DistributedDataParallel(model), model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = training.seeded(lambda: nn.Linear(8, 1, bias=False))
    train(other, other, DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters()))

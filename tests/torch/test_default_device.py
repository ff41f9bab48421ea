# SPDX-License-Identifier: Apache-2.0
"""A program may have set another default device (`torch.set_default_device("cuda")`): our memory lies where it must.

The device "meta", whose tensors have no memory, stands in for a GPU: whatever is put there by mistake cannot be read.
"""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from training import Plain, seeded


def objects(bps: Any) -> None:
    from bps_rdma.torch import broadcast_object, broadcast_optimizer_state

    model = seeded(Plain, bps.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (bps.rank() + 1))
    sum(p.sum() for p in model.parameters() if p.requires_grad).backward()
    optimizer.step()
    sent = torch.full((3000,), float(bps.rank()))
    torch.set_default_device("meta")
    got = broadcast_object({"tensor": sent, "number": 3}, root_rank=1)
    assert got["tensor"].tolist() == [1.0] * 3000
    broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.2


def arrays(bps: Any) -> None:
    mine = torch.arange(6.0) + bps.rank()
    torch.set_default_device("meta")
    assert bps.all_gather(mine, name="g").flatten().tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    assert bps.reduce_scatter(mine, name="r", average=False).numel() == 3
    assert bps.push_pull(mine, name="p", average=False).tolist() == [1, 3, 5, 7, 9, 11]


def float_losses(bps: Any) -> None:
    """An optimizer's closure that returns a float, and the sampler."""
    from bps_rdma.torch import DistributedOptimizer, ElasticSampler

    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    torch.set_default_device("meta")

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return float(loss)

    assert isinstance(optimizer.step(closure), float)
    assert sorted([*ElasticSampler(range(10))]) == sorted({*ElasticSampler(range(10))})


def exactly(bps: Any) -> None:
    """Gradients that are summed without rounding."""
    from bps_rdma.torch import DistributedDataParallel

    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    ddp = DistributedDataParallel(model, exact=True)
    torch.set_default_device("meta")
    ddp(x).pow(2).mean().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.device.type == "cpu"
    assert torch.isfinite(model.weight.grad).all()


def asynchronously(bps: Any) -> None:
    """Servers that keep the weights."""
    from bps_rdma.torch import DistributedOptimizer

    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    torch.set_default_device("meta")
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(x).pow(2).mean().backward()
    optimizer.step()
    assert torch.isfinite(model.weight).all()
    bps.barrier()


@pytest.mark.parametrize("body", [objects, arrays, float_losses, exactly, asynchronously])
def test_memory_lies_where_it_must(body):
    harness.run(body, workers=2, env={"BPS_ASYNC": "1"} if body is asynchronously else {})

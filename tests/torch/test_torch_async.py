# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with BPS_ASYNC=1."""

from __future__ import annotations

from typing import Any

import cluster
import pytest
import torch
from torch import nn

from bps_rdma.errors import InvalidArgumentError

ASYNC = {"BPS_ASYNC": "1"}


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(30, 20)


def trained(bps: Any, steps: int) -> tuple[float, float, list[torch.Tensor]]:
    """Each rank starts with weights of its own, which are those of rank 0 as soon as there is an optimizer."""
    import bps_rdma.torch

    torch.manual_seed(7)
    wanted = torch.randn(20, 30)
    model = linear(bps.rank())
    optimizer = bps_rdma.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), model.named_parameters()
    )
    assert torch.equal(model.weight, linear(0).weight)
    torch.manual_seed(100 + bps.rank())
    test = torch.randn(200, 30)
    before = ((model(test) - test @ wanted.T) ** 2).mean().item()
    for _ in range(steps):
        x = torch.randn(16, 30)
        loss = ((model(x) - x @ wanted.T) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bps.barrier()
    optimizer.zero_grad()
    optimizer.step()  # nothing to add: what the others have added last
    return before, ((model(test) - test @ wanted.T) ** 2).mean().item(), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("staleness", ["-1", "0", "1", "5"])
def test_ranks_train_together(staleness: str) -> None:
    results = cluster.run(trained, 150, workers=3, servers=1, env=ASYNC | {"BPS_STALENESS": staleness})
    for first, last, weights in results:
        assert last < first / 4, (first, last)
        assert all(torch.equal(one, other) for one, other in zip(weights, results[0][2], strict=True))


def test_bytepss_name() -> None:
    results = cluster.run(trained, 50, workers=2, env={"BYTEPS_ENABLE_ASYNC": "1"})
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))


def synchronous(bps: Any) -> None:
    """With staleness 0 weights are what the sum of the ranks' changes makes of them, step by step."""
    import bps_rdma.torch

    models = [linear(0) for _ in range(bps.size())]
    model = models[bps.rank()]
    optimizer = bps_rdma.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    reference = linear(0)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        weights = [p.detach().clone() for p in reference.parameters()]
        total = [torch.zeros_like(p) for p in weights]
        for rank in range(bps.size()):  # what each of them computes
            torch.manual_seed(10 * step + rank)
            reference.zero_grad()
            (reference(torch.randn(4, 30)) ** 2).sum().backward()
            plain.step()
            with torch.no_grad():
                for change, p, before in zip(total, reference.parameters(), weights, strict=True):
                    change.add_(p - before)
                    p.copy_(before)
        torch.manual_seed(10 * step + bps.rank())
        optimizer.zero_grad()
        (model(torch.randn(4, 30)) ** 2).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for p, before, change, got in zip(reference.parameters(), weights, total, model.parameters(), strict=True):
                p.copy_(before + change)
                assert torch.equal(got, p), step


def test_without_staleness_training_is_synchronous() -> None:
    cluster.run(synchronous, workers=3, env=ASYNC | {"BPS_STALENESS": "0"})


def refused(bps: Any) -> None:
    import bps_rdma.torch

    for how in ({"compression": "int8"}, {"compression": bps_rdma.torch.Compression.bf16}, {"exact": True}):
        with pytest.raises(InvalidArgumentError, match="travel as they are"):
            bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(linear(0).parameters(), lr=0.1), **how)


def test_compression_is_refused() -> None:
    cluster.run(refused, workers=1, env=ASYNC)


def goes_on(bps: Any) -> float:
    import bps_rdma.torch
    from bps_rdma.errors import RoundAbortedError

    model = linear(0)
    optimizer = bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    aborted = 0
    step = 0
    while step < 40:
        if bps.rank() == 1 and bps.size() == 3 and step == 10:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(torch.ones(1, 30)) ** 2).sum().backward()
        try:
            optimizer.step()
        except RoundAbortedError:
            aborted += 1
            continue
        step += 1
    assert bps.size() == 2
    assert aborted <= 1
    bps.barrier()
    optimizer.zero_grad()
    optimizer.step()
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def test_a_job_that_may_lose_members_goes_on() -> None:
    env = ASYNC | {"BPS_MIN_WORKERS": "1", "BPS_HEARTBEAT_TIMEOUT": "2"}
    with cluster.start(goes_on, workers=3, servers=1, env=env) as job:
        outcomes = job.outcomes(but=[1])
    assert not outcomes[0].error, outcomes[0].error
    assert not outcomes[2].error, outcomes[2].error
    assert outcomes[0].value == outcomes[2].value

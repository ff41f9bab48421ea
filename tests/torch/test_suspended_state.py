# SPDX-License-Identifier: Apache-2.0
"""What a suspended job had learnt: a rank that comes back later than the others takes it over."""

import os
from typing import Any

import harness
import pytest
import torch
from harness import await_mark, mark
from torch import nn

import bps_rdma.torch as bps_torch

SIZES = [2, 2, 1, 1, 1, 2, 2]  # ranks in each step


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))


def loss(trained: Any, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    result: torch.Tensor = trained(inputs).square().mean()
    return result


def adam(inner: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(inner.parameters(), lr=0.01)


def as_two_as_one_as_two(bps: Any, face: str) -> Any:
    inner = model()
    trained: Any = inner
    optimizer: Any = adam(inner)
    if face == "ddp":
        trained = bps_torch.DistributedDataParallel(inner)
    else:
        optimizer = bps_torch.DistributedOptimizer(optimizer, inner.named_parameters())
    state: Any = bps_torch.TrainingState(trained, optimizer, step=0)

    def train(steps: int) -> None:
        for _ in range(steps):
            state.sync()
            assert bps.size() == SIZES[state.step]
            optimizer.zero_grad()
            loss(trained, state.step, bps.rank()).backward()
            optimizer.step()
            state.step += 1

    train(2)
    rank = bps.rank()
    bps_torch.suspend()
    if rank == 0:
        bps_torch.resume(1, global_rank=0)
        train(3)
        bps_torch.suspend()
        mark("alone")
    await_mark("alone", 0)
    bps_torch.resume(2, global_rank=rank)
    train(2)
    return state.step, [p.detach().clone() for p in inner.parameters()]


@pytest.mark.parametrize("face", ["ddp", pytest.param("optimizer", marks=pytest.mark.long)])
@pytest.mark.parametrize("servers", [None, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_resumes_later_gets_the_state(face, servers):
    results = harness.run(as_two_as_one_as_two, face, workers=2, servers=servers)
    inner = model()
    optimizer = adam(inner)
    for step, size in enumerate(SIZES):
        optimizer.zero_grad()
        for rank in range(size):
            (loss(inner, step, rank) / size).backward()
        optimizer.step()
    for steps, parameters in results:
        assert steps == len(SIZES)
        for mine, theirs, truth in zip(parameters, results[0][1], inner.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, truth.detach(), rtol=2e-4, atol=1e-5)


@harness.on_ranks(workers=2)
def test_a_rank_that_resumes_with_old_weights_is_told(bps: Any) -> None:
    """Rank 1 has missed a step, and does not take over the weights."""
    rank = int(os.environ["RANK"])
    inner = model()
    trained = bps_torch.DistributedDataParallel(inner)
    optimizer = adam(inner)

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss(trained, step, rank).backward()
        optimizer.step()

    train(0)
    bps_torch.suspend()
    if rank == 0:
        bps_torch.resume(1, global_rank=0)
        train(1)
        bps_torch.suspend()
        mark("alone")
    await_mark("alone", 0)
    bps_torch.resume(2, global_rank=rank)
    with pytest.raises(bps.MismatchError) as raised:
        train(2)
    text = str(raised.value)
    assert "0.weight" in text
    assert "call sync() of a TrainingState" in text

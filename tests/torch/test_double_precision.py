# SPDX-License-Identifier: Apache-2.0
"""Models of float64: nothing on the way rounds them to float32, against the same training in one process."""

import copy
from typing import Any

import harness
import torch
from torch import nn

from bps_rdma.torch import (
    CrossBarrier,
    DiLoCo,
    DistributedDataParallel,
    DistributedOptimizer,
    Int8,
    LocalSGD,
    ShardedOptimizer,
    TrainingState,
)

STEPS, EVERY, LR, WORLD = 12, 4, 0.1, 2
HOSTS = harness.on_hosts("ab") | {"env": {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "0"}}


class Mixed(nn.Module):
    """Layers of float64, and one of float32 that they do not depend on."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = nn.Embedding(16, 8, sparse=sparse, dtype=torch.float64)
        self.other = nn.Linear(8, 64)
        self.outer = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows(indices)
        return self.outer(rows), self.other(rows.detach().float())


def loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    indices = torch.randint(16, (16,), generator=torch.Generator().manual_seed(100 * step + rank))
    long, short = net(indices)
    return (long - 1).square().mean() + (short - 1).square().mean()


def assert_same(net: nn.Module, expected: nn.Module) -> None:
    for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        exactly = {"rtol": 1e-13, "atol": 1e-14} if mine.dtype == torch.float64 else {}
        torch.testing.assert_close(mine, theirs, **exactly)


# ---- Agreements of ranks that train alone


def apart(net: nn.Module, optimizer: DiLoCo, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(net, step, rank).backward()
        optimizer.step()


def agreed(lr: float, momentum: float) -> nn.Module:
    """What ranks agree on after STEPS steps, computed in one process."""
    nets, anchor = [Mixed() for _ in range(WORLD)], Mixed()
    outer = torch.optim.SGD(anchor.parameters(), lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss(net, step, rank).backward()
            torch.optim.SGD(net.parameters(), LR).step()
        if (step + 1) % EVERY == 0:
            for one, *theirs in zip(anchor.parameters(), *(net.parameters() for net in nets), strict=True):
                one.grad = torch.stack([one.detach() - each.detach() for each in theirs]).mean(0)
            outer.step()
            for net in nets:
                net.load_state_dict(anchor.state_dict())
    return anchor


@harness.on_ranks(workers=WORLD)
def test_agreements_of_ranks_that_train_apart(bps: Any) -> None:
    for make, outer in ((LocalSGD, (1.0, 0.0)), (DiLoCo, (0.7, 0.9))):
        net = Mixed()
        optimizer = make(torch.optim.SGD(net.parameters(), LR), net.named_parameters(), every=EVERY)
        apart(net, optimizer, bps.rank(), range(STEPS))
        assert_same(net, agreed(*outer))


@harness.on_ranks(workers=WORLD)
def test_fragments_that_take_turns(bps: Any) -> None:
    """Weights that nobody trains stay as they are, in whatever rhythm ranks agree on them."""
    net = Mixed()
    before = copy.deepcopy(net)
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.0), every=2, fragments=2, delay=1, mix=0.5)
    state = TrainingState(net, optimizer)
    state.sync()
    apart(net, optimizer, bps.rank(), range(6))
    assert_same(net, before)
    kept = [(one["anchor"].dtype.itemsize, one["anchor"].numel()) for one in optimizer.state_dict()["fragments"]]
    assert kept == [(4, 512), (8, 128), (4, 64), (8, 36)], "float32 travels as float32"


@harness.on_ranks(**HOSTS)
def test_agreements_beside_compression(bps: Any) -> None:
    net = Mixed()
    before = copy.deepcopy(net)
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.0), every=1, compression=Int8(feedback=True))
    apart(net, optimizer, bps.rank(), range(2))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    apart(net, optimizer, bps.rank(), range(2))
    assert_same(net, before)
    assert [bool(one["compression"]) for one in saved["fragments"]] == [True, False], "only float32 is compressed"


# ---- Means of gradients


def train(net: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (loss(net, step, rank) / len(ranks)).backward()
        optimizer.step()


@harness.on_ranks(workers=WORLD)
def test_means_of_gradients(bps: Any) -> None:
    expected = Mixed()
    train(expected, torch.optim.SGD(expected.parameters(), LR), list(range(WORLD)))
    for kind in ("ddp", "optimizer", "exact", "barrier", "sharded"):
        net = Mixed(sparse=kind in ("ddp", "optimizer"))
        model, inner = net, torch.optim.SGD(net.parameters(), LR)
        optimizer: Any = inner
        if kind == "optimizer":
            optimizer = DistributedOptimizer(inner, net.named_parameters(), sparse=["rows.weight"])
        elif kind == "exact":
            optimizer = DistributedOptimizer(inner, net.named_parameters(), exact=True)
        elif kind == "barrier":
            optimizer = CrossBarrier(net, inner, num_steps=STEPS)
        else:
            model = DistributedDataParallel(net)
        if kind == "sharded":
            optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=LR)
        train(model, optimizer, [bps.rank()])
        assert_same(net, expected)


@harness.on_ranks(workers=WORLD, env={"BPS_ASYNC": "1", "BPS_STALENESS": "0"})
def test_changes_of_weights(bps: Any) -> None:
    """Ranks that do not wait for each other add up what they have changed: each by half, and the sum is that of all."""
    expected, net = Mixed(), Mixed()
    train(expected, torch.optim.SGD(expected.parameters(), LR), list(range(WORLD)))
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), LR / WORLD), net.named_parameters())
    train(net, optimizer, [bps.rank()])
    assert_same(net, expected)

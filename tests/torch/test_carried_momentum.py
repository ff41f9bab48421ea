# SPDX-License-Identifier: Apache-2.0
"""What compression remembers belongs to parameters: it goes with them to other buckets, and to another set of them."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from torch import nn

from bps_rdma.torch import BFloat16, DistributedDataParallel, DistributedOptimizer

MU = 0.5
HOW = BFloat16(momentum=MU)
SMALL = {"BPS_MIN_COMPRESS_BYTES": "0"}
STEPS = 5
SIZE = 4096


class Turned(nn.Module):
    """Its gradients become ready in the order of registration, which is not the one that is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(2 * SIZE))
        self.later = nn.Parameter(torch.zeros(SIZE), requires_grad=False)

    def forward(self, number: float) -> torch.Tensor:
        return (self.first * number).sum() * 2 + (self.last * number).sum() + (self.later * number).sum()


def means(
    bps: Any, face: str, thaws: bool, steps: range = range(STEPS), saved: list[Any] | None = None
) -> tuple[list[float], Any]:
    """The gradients that a rank gets in each step, of all elements the same; and what is remembered then."""
    net = Turned()
    sgd = torch.optim.SGD(net.parameters(), 0.0)
    optimizer: Any = sgd
    forward: Any = net
    if face == "optimizer":
        optimizer = DistributedOptimizer(sgd, net.named_parameters(), compression=HOW)
    else:
        forward = DistributedDataParallel(net, strategy=face, bucket_mb=0.02, compression=HOW)
    compressed = optimizer if face == "optimizer" else forward
    if saved is not None:
        compressed.load_compression_state_dict(saved[bps.rank() % len(saved)])
    found: list[float] = []
    for step in steps:
        if thaws and step == 2:
            net.later.requires_grad_(True)
        optimizer.zero_grad()
        forward(float(2**step)).backward()
        optimizer.step()
        trained = [one.grad for one in (net.first, net.last, net.later) if one.requires_grad]
        assert all(one is not None and one.eq(one[0]).all() for one in trained), (step, trained)
        found += [one[0].item() for one in trained if one is not None]
    return found, compressed.compression_state_dict()


def expected(thaws: bool, rebuilds: bool) -> list[float]:
    momentum, found = [0.0, 0.0, 0.0], []
    for step in range(STEPS):
        if step == 1 and rebuilds:  # buckets are filled in another order after the first pass
            momentum = [0.0, 0.0, 0.0]
        for place, factor in enumerate((2.0, 1.0, 1.0)):
            if place < 2 or (thaws and step >= 2):
                momentum[place] = MU * momentum[place] + factor * 2**step
                found.append(factor * 2**step + MU * momentum[place])
    return found


@pytest.mark.parametrize("thaws", [False, True], ids=["", "thaws"])
@pytest.mark.parametrize("face", ["bucketed", "overlap", "optimizer"])
def test_momentum_goes_with_parameters(face: str, thaws: bool) -> None:
    for found, _ in harness.run(means, face, thaws, workers=2, env=SMALL):
        assert found == pytest.approx(expected(thaws, face == "bucketed"), rel=0.01)


def to_another_format(bps: Any, change: int) -> list[bool]:
    """Whether all elements of a gradient have one mean, in each step; the memory format changes before one of them."""
    weight = nn.Conv2d(8, 8, 8, bias=False)
    later = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
    net = nn.ModuleList([weight, nn.ParameterList([later])])
    pattern = torch.arange(SIZE, dtype=torch.float32).remainder(64).add(1).view(8, 8, 8, 8)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.0), net.named_parameters(), compression=HOW)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        if step == change:
            net.to(memory_format=torch.channels_last)
        later.requires_grad_(step >= 2)
        ((weight.weight * pattern).sum() + later.sum()).backward()
        optimizer.step()
        assert weight.weight.grad is not None
        ratios = weight.weight.grad / pattern
        found.append(bool(ratios.sub(ratios[0, 0, 0, 0]).abs().max() < 0.05))
    return found


@pytest.mark.parametrize("change", [1, 2])
def test_momentum_stays_with_its_elements(change: int) -> None:
    """It begins again where they lie elsewhere."""
    for found in harness.run(to_another_format, change, workers=2, env=SMALL):
        assert all(found)


@pytest.mark.parametrize("face", ["bucketed", "optimizer"])
@pytest.mark.parametrize("after", ["aabb", "abab", "aabbab"])
def test_momentum_survives_a_restart(face: str, after: str) -> None:
    """Other ranks encode then, and new ones load what others have saved, too."""
    env = SMALL | {"BPS_SECRET": "0123456789abcdef"}
    first = harness.run(means, face, False, range(3), **harness.on_hosts("aabb"), env=env | harness.cut_at(16384))
    saved = [state for _, state in first]
    where = harness.on_hosts(after) | {"env": env | harness.cut_at(8192)}
    for found, _ in harness.run(means, face, False, range(3, STEPS), saved, **where):
        assert first[0][0] + found == pytest.approx(expected(False, face == "bucketed"), rel=0.01)


@pytest.mark.parametrize("face", ["bucketed"])
def test_parts_that_no_rank_has_loaded_are_told(face: str) -> None:
    env = SMALL | {"BPS_SECRET": "0123456789abcdef"}
    first = harness.run(means, face, False, range(3), **harness.on_hosts("aabb"), env=env)
    saved = [state for _, state in first[:2]]
    with harness.start(means, face, False, range(3, STEPS), saved, **harness.on_hosts("ab"), env=env) as job:
        said = [line for one in job.outcomes() for line in one.output.splitlines() if "is lost in part" in line]
        job.values()
    assert said
    assert all("bucket" in line and line.endswith("was saved by 2, 3") for line in said), said

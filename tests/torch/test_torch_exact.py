# SPDX-License-Identifier: Apache-2.0
"""Exact means in the torch face; bfloat16, which numpy lacks."""

from fractions import Fraction
from typing import Any

import harness
import pytest
import torch
from harness import mark
from strategies import with_every_strategy
from torch import nn

import bps_rdma.torch
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch import DistributedDataParallel


def terms(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [(torch.randn(3000) * 10.0 ** torch.randint(-9, 5, (3000,))).to(dtype) for _ in range(4)]


def rounded(value: Fraction) -> float:
    """To bfloat16, ties to even."""
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 7)
    return float(round(value / unit) * unit)


def expected(divisor: int) -> torch.Tensor:
    columns = zip(*(one.tolist() for one in terms(torch.bfloat16)), strict=True)
    exact = [rounded(sum((Fraction(term) for term in column), Fraction(0)) / divisor) for column in columns]
    return torch.tensor(exact, dtype=torch.float64).to(torch.bfloat16)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long), 4])
@harness.on_ranks("workers")
def test_bfloat16_is_rounded_once(bps: Any) -> None:
    mine = terms(torch.bfloat16)[bps.rank() :: bps.size()]
    total = bps.ExactSum(mine[0])
    for one in mine:
        total.add(one)
    assert torch.equal(total.push_pull(), expected(1))
    assert torch.equal(total.push_pull(divisor=3), expected(3))
    if bps.size() == 4:
        assert torch.equal(bps_rdma.torch.push_pull(mine[0], average=False, name="a", exact=True), expected(1))
        assert torch.equal(bps_rdma.torch.push_pull(mine[0], name="b", exact=True), expected(4))


def trained(bps: Any, strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 3), nn.Linear(3, 3))
    never = model[2]
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.004, exact=True, find_unused_parameters=True)
    gradients = []
    for rank in range(bps.size()):  # what every rank computes
        torch.manual_seed(100 + rank)
        model.zero_grad()
        model[1](model[0](torch.randn(8, 50))).sum().backward()
        gradients.append([p.grad.double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    torch.manual_seed(100 + bps.rank())
    with ddp.no_sync():
        pass
    inputs = torch.randn(8, 50)
    ddp.module.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    ddp(inputs).sum().backward()
    assert never.weight.grad is None
    for number, parameter in enumerate(p for p in model.parameters() if p.grad is not None):
        # Of four float32 of similar size float64 holds the sum, and division by four rounds nothing.
        mean = sum(of_rank[number] for of_rank in gradients) / bps.size()
        assert torch.equal(parameter.grad, mean.float())


def test_gradients_are_rounded_once() -> None:
    harness.run(with_every_strategy, trained, workers=4)
    harness.run(with_every_strategy, trained, **harness.on_hosts("aabb"))


@harness.on_ranks(workers=3, env={"BPS_MIN_WORKERS": "2"}, kills="rank 2")
def test_what_has_accumulated_when_the_ranks_become_others_is_not_rounded(bps: Any) -> None:
    """The means of two passes: 256 and 1 on rank 0, whose sum in bfloat16 is 256, and 0 and 1 on the others."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model, exact=True)
    first, second = (torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0 * (bps.rank() == 0), 1.0))
    found = []
    while not found or found[-1][0] == 3:
        model.zero_grad()
        with ddp.no_sync():
            ddp(first).sum().backward()
        try:
            ddp(second).sum().backward()
        except bps.RoundAbortedError:
            continue
        assert model.weight.grad is not None
        found.append((bps.size(), model.weight.grad.item()))
        mark("running")
    assert [found[0][1], found[-1][1]] == [86.5, 129.0]


@harness.on_ranks(workers=1)
def test_compression_is_refused(bps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="not exact"):
        DistributedDataParallel(nn.Linear(2, 2), compression=bps.Int8(), exact=True)


@pytest.mark.parametrize("env", [{}, {"BPS_TRANSPORT": "tcp"}], ids=["shm", "tcp"])
@harness.on_ranks("env", workers=2)
def test_sums_do_not_flush_subnormals(bps: Any) -> None:
    """What the caller's thread does with subnormal numbers is its own affair."""
    tiny = torch.full((5000,), 1e-40)
    bits = tiny.view(torch.int32).clone()
    assert bits.all()
    assert torch.set_flush_denormal(True)
    for name, exact in (("exact", True), ("plain", False)):
        for timeout in (None, 60):
            result = bps.push_pull(tiny, name=name, average=False, exact=exact, timeout=timeout)
            assert torch.equal(result.view(torch.int32), bits * bps.size()), name
    total = bps.ExactSum(tiny, name="total")
    for _ in range(3):
        total.add(tiny)
    assert torch.equal(total.push_pull().view(torch.int32), bits * 3 * bps.size())
    assert (tiny * 1.0).view(torch.int32).eq(0).all(), "the caller has its setting still"
    torch.set_flush_denormal(False)

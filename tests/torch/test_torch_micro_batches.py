# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in the torch face: with exact means, how they are spread over ranks and passes does not matter."""

import functools
import hashlib
from typing import Any

import harness
import numpy as np
import pytest
import torch
from reference.exact_sums import exact_sum, gradients
from strategies import STRATEGIES
from torch import nn

from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer


class Slopes(nn.Module):
    """Gradients are what the caller says: of three parameters, one of which is never used."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        of = getattr(torch, dtype)
        self.large = nn.Parameter(torch.zeros(5_000, dtype=of))
        self.small = nn.Parameter(torch.zeros(20, 50, dtype=of))
        self.never = nn.Parameter(torch.zeros(3, dtype=of))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return Given.apply(self.large, self.small, gradient)  # type: ignore[no-untyped-call, no-any-return]


class Given(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, large: torch.Tensor, small: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        context.gradient = gradient
        return large.sum() * 0

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> Any:
        # Not .view(): what autograd gets is its own.
        return context.gradient[:5_000].clone(), context.gradient[5_000:].reshape(20, 50).clone(), None


def digest(model: Slopes) -> str:
    found = [parameter.grad.reshape(-1).numpy() for parameter in (model.large, model.small)]  # type: ignore[union-attr]
    return hashlib.sha256(np.concatenate(found).tobytes()).hexdigest()


def without_odd_ones(gradient: Any, factor: float) -> Any:
    """Times a power of two, which rounds nothing but subnormals."""
    finite = np.nan_to_num(gradient, posinf=0, neginf=0)
    return np.where(np.abs(finite) < 1e-30, 0, finite) * gradient.dtype.type(factor)


def micro_batches(bps: Any, dtype: str, *, scaled: bool) -> list[torch.Tensor]:
    """This rank's share of eight gradients; scaled so that the mean over ranks is that over all of them."""
    mine = gradients(dtype)[bps.rank() :: bps.size()]
    return [torch.from_numpy(without_odd_ones(one, bps.size() / 8) if scaled else one) for one in mine]


def with_no_sync(bps: Any, dtype: str, strategy: Any, scaled: bool) -> str:
    model = Slopes(dtype)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.01, exact=True, find_unused_parameters=True)
    found = set()
    for step in range(3):  # buckets are filled anew after the first one
        *first, last = micro_batches(bps, dtype, scaled=scaled)
        with ddp.no_sync():
            for gradient in first:
                ddp(gradient).backward()
        if first:
            total = model.large.grad.clone()  # type: ignore[union-attr]
            rounded = functools.reduce(lambda a, b: a + b, first)[:5_000]
            assert torch.equal(total.nan_to_num(), rounded.nan_to_num())  # .grad shows what it always does
        ddp(last).backward()
        found.add(digest(model))
        assert model.never.grad is None
        ddp.zero_grad(set_to_none=step == 0)
        if step == 1:  # as if gradients of None had been set
            for parameter in (model.large, model.small):
                parameter.grad.fill_(-0.0)  # type: ignore[union-attr]
    assert len(found) == 1
    return found.pop()


def with_passes(bps: Any, dtype: str, strategy: Any, scaled: bool) -> str:
    model = Slopes(dtype)
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    mine = micro_batches(bps, dtype, scaled=scaled)
    passes = 8 // bps.size()
    optimizer = DistributedOptimizer(
        sgd, model.named_parameters(), strategy=strategy, bucket_mb=0.01, exact=True, find_unused_parameters=True
    )
    optimizer.set_backward_passes_per_step(passes)
    found = set()
    for _ in range(2):
        for gradient in mine:
            model(gradient).backward()
        optimizer.synchronize()
        found.add(digest(model))
        assert model.never.grad is None
        optimizer.zero_grad()
    assert len(found) == 1
    return found.pop()


def everything(bps: Any, dtype: str, scaled: bool) -> set[str]:
    return {body(bps, dtype, strategy, scaled) for body in (with_no_sync, with_passes) for strategy in STRATEGIES}


@functools.cache
def expected(dtype: str, divisor: int) -> str:
    return hashlib.sha256(exact_sum(gradients(dtype), divisor).tobytes()).hexdigest()


WORLDS: dict[str, Any] = {
    "one": {"workers": 1},
    "two": {"workers": 2},
    "two and two": harness.on_hosts("aabb"),
    "eight": {"workers": 8},
}
SHORT = {("float32", "two and two"), ("float64", "two")}


@pytest.mark.parametrize(
    ("dtype", "world"),
    [
        pytest.param(dtype, world, marks=() if (dtype, world) in SHORT else pytest.mark.long)
        for dtype in ("float32", "float16", "float64")
        for world in WORLDS
    ],
)
def test_means_are_those_of_rational_arithmetic(dtype: str, world: str) -> None:
    where = WORLDS[world]
    results = harness.run(everything, dtype, False, **where)
    assert set().union(*results) == {expected(dtype, len(results))}


def test_one_digest_for_all_worlds() -> None:
    found = [harness.run(everything, "float32", True, workers=world) for world in (1, 2, 4, 8)]
    assert len({one for results in found for result in results for one in result}) == 1


@harness.on_ranks(workers=2)
def test_ranks_may_differ_and_gradients_may_be_changed(bps: Any) -> None:
    """Ranks that accumulate and ranks that do not; parameters that some use; gradients that the caller changes."""
    model = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])
    ddp = DistributedDataParallel(nn.Sequential(*model), exact=True)
    ones = torch.ones(1, 3)

    def forward(x: torch.Tensor) -> torch.Tensor:  # only rank 0 uses the second layer
        return model[0](x).sum() + (model[1](x).sum() if bps.rank() == 0 and x[0, 0] > 1 else 0)  # type: ignore[no-any-return]

    ddp.module.forward = forward
    tiny = 2.0**-24
    for zeroes, passes in (("", 1 + bps.rank()), ("none", 2), ("zero", 3), ("halve", 3)):
        for parameter in model.parameters():
            parameter.grad = None
        with ddp.no_sync():
            for _ in range(passes - 1):
                ddp(2 * ones).backward()
            if zeroes == "none":
                ddp.zero_grad()
            elif zeroes == "zero":
                ddp.zero_grad(set_to_none=False)
            elif zeroes == "halve":
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= 4
            for _ in range(4):
                ddp(tiny * ones).backward()  # lost by rounding if it is added to 2 alone
        ddp(2 * ones).backward()
        kept = {"": [0, 2], "none": [0, 0], "zero": [0, 0], "halve": [1, 1]}[zeroes]
        sum_of_ranks = sum(kept) + 2 * (2 + 4 * tiny)
        assert torch.equal(model[0].weight.grad, torch.full((1, 3), np.float32(sum_of_ranks / 2))), zeroes
        assert model[1].weight.grad is not None


def barrier(bps: Any) -> str:
    model = Slopes("float32")
    optimizer = CrossBarrier(
        model, torch.optim.SGD(model.parameters(), 1.0), backward_passes_per_step=4, exact=True,
        find_unused_parameters=True,
    )  # fmt: skip
    for gradient in micro_batches(bps, "float32", scaled=True):
        model(gradient).backward()
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    return hashlib.sha256(model.large.detach().numpy().tobytes()).hexdigest()


def test_cross_barrier() -> None:
    mine = [without_odd_ones(one[:5_000], 1 / 8) for one in gradients("float32")]
    with np.errstate(all="ignore"):
        weights = (np.float32(0) - exact_sum(mine)).tobytes()
    assert set(harness.run(barrier, workers=2)) == {hashlib.sha256(weights).hexdigest()}


@harness.on_ranks(workers=2)
def test_overflow(bps: Any) -> None:
    """A whole tensor of infinities and NaN, as after an overflow, costs no more memory than any other."""
    total = bps.ExactSum(np.zeros(100_000, np.float32), name="overflow")
    for value in (1.0, np.inf, -np.inf if bps.rank() == 0 else 3.0):
        total.add(np.full(100_000, value, np.float32))
    assert not total._sum.beyond()
    assert np.isnan(total.push_pull()).all()
    total.clear()
    total.add(np.full(100_000, np.inf if bps.rank() == 0 else -np.inf, np.float32))
    assert np.isnan(total.push_pull()).all()
    # Long on one rank, infinite on the other one.
    total.clear()
    for value in (1e30, 1e-30) if bps.rank() == 0 else (np.inf,):
        total.add(np.full(100_000, value, np.float32))
    assert len(total._sum.beyond()) == (100_000 if bps.rank() == 0 else 0)
    assert (total.push_pull() == np.inf).all()

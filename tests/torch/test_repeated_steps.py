# SPDX-License-Identifier: Apache-2.0
"""A step() of a DistributedOptimizer has failed on all ranks, and other gradients follow: these are averaged."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from torch import nn

from bps_rdma.torch import DistributedOptimizer


class Trained:
    """A model of one weight, whose gradient is what forward gets, and whose next steps fail as often as is set."""

    def __init__(self, **options: Any) -> None:
        self.model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer: Any = DistributedOptimizer(sgd, self.model.named_parameters(), **options)
        self.optimizer.register_step_pre_hook(self._before)
        self.before: list[Callable[[], None]] = []  # what the hooks of the next steps do

    def _before(self, *_: Any) -> None:
        if self.before:
            self.before.pop()()

    def backward(self, x: float) -> None:
        self.model(torch.full((1, 4), x)).sum().backward()

    def fail(self) -> None:
        self.before.append(fail)
        with pytest.raises(ZeroDivisionError):
            self.optimizer.step()


def fail() -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("exact", [False, True])
@harness.on_ranks(workers=2)
def test_other_gradients_are_averaged(bps: Any, exact: bool) -> None:
    """Those of a backward without optimizer.zero_grad(), and those that the script writes."""
    trained, x = Trained(exact=exact), 1.0 + 2 * bps.rank()
    model: Any = trained.model
    weight = model.weight
    trained.backward(x)
    trained.fail()
    model.zero_grad()
    trained.backward(x)
    assert weight.grad.eq(2).all()
    trained.fail()
    model.zero_grad()
    weight.grad = torch.full((1, 4), 10 * x)
    trained.optimizer.step()
    assert weight.eq(-20).all()
    trained.optimizer.zero_grad()
    trained.backward(x)
    trained.fail()
    model.zero_grad(set_to_none=False)
    weight.grad.add_(10 * x)
    trained.optimizer.step()
    assert weight.eq(-40).all()


@harness.on_ranks(workers=2)
def test_a_failed_step_in_join_is_followed_by_another_batch(bps: Any) -> None:
    trained = Trained()
    with trained.optimizer.join():
        for batch in range(3 if bps.rank() == 1 else 1):
            trained.model.zero_grad()
            trained.backward(1.0 + 2 * bps.rank())
            if batch == 0:
                trained.fail()
            else:
                trained.optimizer.step()
    assert trained.model.weight.eq(-3).all()  # two means of 3 and nothing


@harness.on_ranks(workers=2)
def test_a_step_may_run_a_backward(bps: Any) -> None:
    """As one that looks at the gradients of other weights does, in a hook."""
    trained, x = Trained(exact=True), 1.0 + 2 * bps.rank()
    for _ in range(2):
        trained.optimizer.zero_grad()
        trained.backward(x)
        trained.before.append(lambda: trained.backward(x))
        trained.optimizer.step()
    assert trained.model.weight.eq(-2 * (2 + 2)).all()


@harness.on_ranks(workers=2)
def test_gradients_written_to_data_are_averaged(bps: Any) -> None:
    """Which changes no version, as copies of master gradients do."""
    trained, x = Trained(), 1.0 + 2 * bps.rank()
    weight: Any = trained.model.weight
    weight.grad = torch.zeros(1, 4)
    weight.grad.data.copy_(torch.full((1, 4), x))
    trained.fail()
    weight.grad.data.copy_(torch.full((1, 4), 10 * x))
    trained.optimizer.step()
    assert weight.eq(-20).all(), weight


@harness.on_ranks(workers=2)
def test_a_rank_synchronizes_before_it_repeats_its_step(bps: Any) -> None:
    trained, x = Trained(), 1.0 + 2 * bps.rank()
    trained.backward(x)
    if bps.rank() == 1:
        trained.fail()
        trained.optimizer.synchronize()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.backward(10 * x)
    trained.optimizer.step()
    assert trained.model.weight.eq(-22).all(), trained.model.weight


@harness.on_ranks(workers=2)
def test_the_error_of_a_step_counts_more_than_what_cannot_be_told_of_gradients(bps: Any) -> None:
    """A device that has failed gives no values."""
    trained, x = Trained(), 1.0 + 2 * bps.rank()
    refused = mock.patch("bps_rdma.torch.seen_gradients.digest_of_some", side_effect=RuntimeError("a failed device"))
    trained.backward(x)
    with refused:
        trained.fail()
    trained.optimizer.zero_grad()
    trained.backward(x)
    trained.optimizer.step()
    assert trained.model.weight.eq(-2).all()


@pytest.mark.parametrize(("passes", "strategy"), [(1, "bucketed"), (2, "bucketed"), (2, "overlap")])
@pytest.mark.parametrize("joins", [False, True])
@harness.on_ranks(workers=2)
def test_a_batch_may_make_no_step(bps: Any, joins: bool, passes: int, strategy: str) -> None:
    """As one whose loss is not finite. The script drops its gradients by model.zero_grad()."""
    options = {"exact": not joins, "backward_passes_per_step": passes, "strategy": strategy}
    trained, x = Trained(**options), 1.0 + 2 * bps.rank()
    model: Any = trained.model
    with trained.optimizer.join() if joins else contextlib.nullcontext():
        for batch in range(3):
            model.zero_grad()
            for _ in range(passes):
                trained.backward(x)
            if batch != 1:
                trained.optimizer.step()
        model.zero_grad()
        for _ in range(passes):
            trained.backward(x)
        with pytest.raises(bps.BpsError, match="again before step"):
            trained.backward(x)
        model.zero_grad()
    assert model.weight.eq(-4 * passes).all(), model.weight

# SPDX-License-Identifier: Apache-2.0
"""A backward before the last one of a step fails on one rank: no rank gets means of a part of a micro-batch."""

import contextlib
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from failed_passes import SIZE, Layers

from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer

REFUSED = r"backward\(\) failed before its end, and what it computed is still in the gradient of "


class Steps:
    """Steps of several micro-batches by SGD with lr=1, so that weights are the sums of all means.

    Args:
        kind: "model", "optimizer" or "barrier".
        options: of the wrapper.
    """

    def __init__(self, kind: str, micro_batches: int, options: dict[str, Any]) -> None:
        self.model, self._micro_batches = Layers(), micro_batches
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.wrapped: Any = self.model
        self.optimizer: Any = sgd
        if kind == "model":
            self.wrapped = DistributedDataParallel(self.model, **options)
        elif kind == "optimizer":
            named = self.model.named_parameters()
            self.optimizer = DistributedOptimizer(sgd, named, backward_passes_per_step=micro_batches, **options)
        else:
            self.optimizer = CrossBarrier(self.model, sgd, backward_passes_per_step=micro_batches, **options)

    def backward(self, x: float, number: int) -> None:
        alone = self.wrapped is not self.model and number < self._micro_batches - 1
        with self.wrapped.no_sync() if alone else contextlib.nullcontext():
            self.wrapped(torch.full((SIZE,), x)).backward()

    def fail(self, number: int, layer: int) -> None:
        """In a micro-batch, before the gradient of this layer."""
        with training.failing(self.model.all[layer].weight.register_hook):
            self.backward(100.0, number)

    def step(self, x: float, first: int = 0) -> None:
        for number in range(first, self._micro_batches):
            self.backward(x, number)
        self.optimizer.step()
        if isinstance(self.optimizer, torch.optim.Optimizer) and hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()

    def check(self, sum_of_means: float) -> None:
        assert self.model.weights == [-sum_of_means] * 4


def each_kind(bps: Any, body: Callable[[Steps, Any], None], micro_batches: int, **options: Any) -> None:
    for kind in ("model", "optimizer", "barrier"):
        try:
            body(Steps(kind, micro_batches, options), bps)
        except Exception as error:
            raise AssertionError(kind) from error


@pytest.mark.parametrize("zeroes", ["by the optimizer", "by the model", "in place", "past autograd"])
@harness.on_ranks(workers=2)
def test_gradients_that_are_zeroed_begin_another_step(bps: Any, zeroes: str) -> None:
    """The other rank waits for that one."""

    def body(steps: Steps, bps: Any) -> None:
        steps.optimizer.zero_grad()
        if bps.rank() == 1:
            steps.backward(100.0, 0)
            steps.fail(1, layer=2)
            if zeroes == "by the optimizer":
                steps.optimizer.zero_grad()
            elif zeroes == "past autograd":
                for each in steps.model.parameters():
                    each.grad.data.zero_()
            else:
                steps.model.zero_grad(set_to_none=zeroes == "by the model")
        steps.step(1.0 + bps.rank())
        steps.check(4.5)
        steps.optimizer.zero_grad()
        steps.step(1.0 + bps.rank())
        steps.check(9.0)

    each_kind(bps, body, 3)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("before", [0, 1])
@harness.on_ranks(workers=2)
def test_what_it_has_left_is_added_to_nothing(bps: Any, before: int, layer: int) -> None:
    """A script that skips the micro-batch alone has a part of it in its gradients."""

    def body(steps: Steps, bps: Any) -> None:
        for _ in range(2):
            steps.optimizer.zero_grad()
            if bps.rank() == 1:
                for number in range(before):
                    steps.backward(100.0, number)
                steps.fail(before, layer)
            with pytest.raises(bps.RefusedError, match=REFUSED):
                steps.step(1.0 + bps.rank(), first=(before + 1) * bps.rank())
            steps.check(0)
        steps.optimizer.zero_grad()
        steps.step(1.0 + bps.rank())
        steps.check(4.5)

    each_kind(bps, body, 3)


@harness.on_ranks(workers=2)
def test_what_a_single_backward_has_left_is_added_to_nothing(bps: Any) -> None:
    def body(steps: Steps, bps: Any) -> None:
        steps.optimizer.zero_grad()
        if bps.rank() == 1:
            steps.fail(0, layer=2)
        with pytest.raises(bps.RefusedError, match=REFUSED):
            steps.step(1.0 + bps.rank())
        steps.check(0)
        steps.optimizer.zero_grad()
        steps.step(1.0 + bps.rank())
        steps.check(1.5)

    for kind in ("model", "optimizer"):
        body(Steps(kind, 1, {"strategy": "flat"}), bps)


@harness.on_ranks(workers=2)
def test_exact_sums_of_micro_batches_begin_again(bps: Any) -> None:
    def body(steps: Steps, bps: Any) -> None:
        steps.optimizer.zero_grad()
        if bps.rank() == 1:
            steps.fail(0, layer=2)
            steps.model.zero_grad()
        steps.step(1.0 + bps.rank())
        steps.check(3.0)

    each_kind(bps, body, 2, exact=True)

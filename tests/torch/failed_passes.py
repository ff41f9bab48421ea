# SPDX-License-Identifier: Apache-2.0
"""Backwards that fail on one rank: the models of their tests, and what the ranks are told."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import training
from torch import nn

import bps_rdma
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer

SIZE, LAYERS = 500, 4
BUCKETS = {"bucket_mb": 0.001}  # one for each layer
FAILED = r"backward\(\) failed before the gradient of "


def fail_late(synchronizer: Any) -> None:
    """For hooks: sums of what has been sent are complete by then."""
    begun = synchronizer._pass._begun
    harness.eventually(lambda: all(one.done() for one in begun), what="sums are complete")
    raise ZeroDivisionError("on purpose")


def is_told(call: Callable[[], object]) -> None:
    """This call says that a backward has failed, on this rank or on rank 1."""
    kind = bps_rdma.BpsError if bps_rdma.rank() == 1 else bps_rdma.RefusedError
    with pytest.raises(kind, match=FAILED if bps_rdma.rank() == 1 else f"worker 1 cannot take part: {FAILED}"):
        call()


def lose(parameter: torch.Tensor, backward: Callable[[], object], finish: Callable[[], object]) -> None:
    """Makes a backward that fails on rank 1 before it has the gradient of this parameter: all ranks are told."""
    if bps_rdma.rank() == 1:
        with training.failing(parameter.register_hook):
            backward()
        is_told(finish)
    else:
        is_told(backward)


class Chain(nn.Module):
    """Layers one after the other, so that backward computes their gradients one after the other."""

    def __init__(self, has_rows: bool = False) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(SIZE) for _ in range(LAYERS))
        self.rows = nn.Embedding(8, 4, sparse=True) if has_rows else None
        if self.rows is not None:
            nn.init.ones_(self.rows.weight)

    @property
    def first(self) -> nn.Parameter:
        return self.scales[0] if self.rows is None else self.rows.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            x = self.rows(torch.arange(8)).sum() / 32 * x
        for scale in self.scales:
            x = x * scale
        return x.sum()


class Layer(nn.Module):
    """Its gradient does not depend on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return before + self.weight * x


class Layers(nn.Module):
    """Backward computes their gradients one after the other, from the last one on."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(x)
        for each in self.all:
            before = each(x, before)
        return before.sum()

    @property
    def weights(self) -> list[float]:
        return [float(each.weight[0]) for each in self.all]


class Trained:
    """A model that is trained without changing its parameters.

    Args:
        what: is wrapped, the "model" or its "optimizer".
        has_rows: its first parameter has sparse gradients.
        micro_batches: whose gradients are added up.
        options: of the wrapper.
    """

    def __init__(self, what: str, *, has_rows: bool = False, micro_batches: int = 1, **options: Any) -> None:
        self.model, self._micro_batches = Chain(has_rows), micro_batches
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.0)
        if what == "model":
            self._ddp: DistributedDataParallel | None = DistributedDataParallel(self.model, **options)
            self.finish, self._zero = self._ddp.finish_gradient_synchronization, optimizer.zero_grad
            self.join = self._ddp.join
            self._synchronizer = lambda: self._ddp.synchronizer
            return
        self._ddp, named, sparse = None, self.model.named_parameters(), ["rows.weight"] if has_rows else ()
        ours: Any = DistributedOptimizer(
            optimizer, named, backward_passes_per_step=micro_batches, sparse=sparse, **options
        )
        self.finish, self._zero, self.join = ours.synchronize, ours.zero_grad, ours.join
        self._synchronizer = lambda: ours._bps_trained.synchronizer

    @property
    def wrapper(self) -> DistributedDataParallel:
        assert self._ddp is not None
        return self._ddp

    @property
    def passes(self) -> int:
        return self._synchronizer().passes

    @property
    def units(self) -> list[Any]:
        return self._synchronizer().units

    def make_pass(self, x: float = 1.0) -> None:
        """One whose gradients are x."""
        self._zero()
        for number in range(self._micro_batches):
            alone = self._ddp is not None and number < self._micro_batches - 1
            with self._ddp.no_sync() if alone else contextlib.nullcontext():
                (self._ddp or self.model)(torch.full((SIZE,), x)).backward()

    def check(self, mean: float) -> None:
        for number, scale in enumerate(self.model.scales):
            expected = torch.full((SIZE,), mean * self._micro_batches)
            torch.testing.assert_close(scale.grad, expected, rtol=0.02, atol=0, msg=f"layer {number}")

    def make_passes(self, times: int = 1, factor: float = 1.0) -> None:
        """Such whose gradients are 1, 2, ... on the ranks, or 1 and 1 + factor; all ranks have their means."""
        for _ in range(times):
            self.make_pass(1.0 + factor * bps_rdma.rank())
            self.check(1 + factor * (bps_rdma.size() - 1) / 2)

    def fail(self, when: str = "late", layer: int = 0) -> None:
        """Makes a pass that fails: "early", or "late", when all gradients from this layer on but its own are there."""
        parameter = self.model.scales[layer] if layer else self.model.first
        fails = training.failing(parameter.register_hook, self.fail_late) if when == "late" else self.failing_early()
        with fails:
            self.make_pass(2.0)

    @contextlib.contextmanager
    def failing_early(self, backwards: int = 0) -> Iterator[None]:
        """In this block the backward of the model fails before it has computed a gradient, after so many backwards."""
        forward, left = self.model.forward, backwards

        def fails(x: torch.Tensor) -> torch.Tensor:
            output = forward(x)
            between = output * 1
            output.register_hook(count)
            return between

        def count(gradient: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                training.fail(gradient)

        with mock.patch.object(self.model, "forward", fails), pytest.raises(ZeroDivisionError):
            yield

    def fail_late(self, _: torch.Tensor) -> None:
        if self._synchronizer().open:
            fail_late(self._synchronizer())

    def lose(self, when: str = "late", layer: int = 0, then: Callable[[], object] = lambda: None) -> None:
        """A pass fails on rank 1, which does that `then`: all ranks are told."""
        if bps_rdma.rank() == 1:
            self.fail(when, layer)
            then()
            is_told(self.finish)
        else:
            is_told(self.make_pass)


def with_buffers() -> Trained:
    """After two passes. It sends nothing before the end of backward."""
    trained = Trained("model", strategy="flat")
    trained.model.register_buffer("seen", torch.zeros(4))
    trained.make_passes(2)
    return trained

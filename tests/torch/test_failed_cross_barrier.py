# SPDX-License-Identifier: Apache-2.0
"""A backward of CrossBarrier fails on one rank: all ranks make the same updates, and raise an error together."""

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from failed_passes import LAYERS, SIZE, Layer, Layers, fail_late, is_told
from torch import nn
from torch.utils.checkpoint import checkpoint

from bps_rdma.torch import CrossBarrier, DistributedOptimizer


def failing_late(optimizer: Any) -> Callable[[torch.Tensor], None]:
    """A hook of a backward of CrossBarrier."""
    return lambda _: fail_late(optimizer._bps_trained.synchronizer)


def step(bps: Any, model: nn.Module, optimizer: Any) -> None:
    """Calls step(), and waits until its updates are made."""
    backward(bps, model, optimizer)
    optimizer.step()
    optimizer.synchronize()


def backward(bps: Any, model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.full((SIZE,), 1.0 + bps.rank())).backward()


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"find_unused_parameters": True}])
@harness.on_ranks(workers=2)
def test_cross_barrier_makes_the_same_updates_on_all_ranks(bps: Any, options: dict[str, Any]) -> None:
    model = Layers()
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    step(bps, model, optimizer)
    if bps.rank() == 1:
        with training.failing(model.all[1].weight.register_hook, failing_late(optimizer)):
            backward(bps, model, optimizer)
        optimizer.step()
        is_told(optimizer.synchronize)
    else:
        is_told(functools.partial(step, bps, model, optimizer))
    assert model.weights == [-1.5, -1.5, -3, -3]
    step(bps, model, optimizer)
    assert model.weights == [-3, -3, -4.5, -4.5]


@pytest.mark.parametrize("repeats", [False, True])
@harness.on_ranks(workers=2)
def test_cross_barrier_raises_the_error_in_the_same_forward_on_all_ranks(bps: Any, repeats: bool) -> None:
    """So they make equally many passes, whether they all go on or all repeat that batch."""
    model, batches = Layers(), 6
    optimizer: Any = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0), num_steps=5)
    failed: list[tuple[int, type[Exception]]] = []
    batch = 0
    while batch < batches:
        try:
            optimizer.zero_grad()
            loss = model(torch.full((SIZE,), 1.0 + bps.rank()))
            fails = training.failing(model.all[1].weight.register_hook, failing_late(optimizer))
            with fails if (bps.rank(), batch) == (1, 2) else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
        except bps.BpsError as error:
            failed.append((batch, type(error)))
            if repeats:
                continue
        if optimizer._bps_steps_left == 0:  # step number 5 has waited
            assert not optimizer._bps_due
            break
        batch += 1
    assert failed == [(3, bps.RefusedError)]
    assert batch == (4 if repeats else 5)
    assert optimizer._bps_trained.passes == 5
    assert model.weights == [-6, -6, -7.5, -7.5]


@harness.on_ranks(workers=2)
def test_the_last_step_of_cross_barrier_tells_of_a_failure(bps: Any) -> None:
    model = Layers()
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0), num_steps=1)
    loss = model(torch.full((SIZE,), 1.0 + bps.rank()))
    fails = training.failing(model.all[1].weight.register_hook, failing_late(optimizer))
    with fails if bps.rank() == 1 else contextlib.nullcontext():
        loss.backward()
    is_told(optimizer.step)
    assert model.weights == [0, 0, -1.5, -1.5]


class Checkpointed(nn.Module):
    """Backward computes the gradient of its last layer in a backward of its own, before those of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(), Layer()
        self.between: list[Any] = []  # hooks of the gradient between these

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.first(x, torch.zeros_like(x))
        for hook in self.between:
            before.register_hook(hook)
        last: Any = checkpoint(self.last, x, before, use_reentrant=True)
        return last.sum()

    @property
    def weights(self) -> list[float]:
        return [float(each.weight[0]) for each in (self.first, self.last)]


@pytest.mark.parametrize("zeroes", [False, True])
@harness.on_ranks(workers=2)
def test_cross_barrier_sees_a_failure_outside_of_a_checkpoint(bps: Any, zeroes: bool) -> None:
    """What waits for the end of backward outlives it there, with the graph."""
    model = Checkpointed()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = CrossBarrier(model, sgd, find_unused_parameters=True)

    def late() -> None:
        optimizer.step()
        optimizer.synchronize()

    step(bps, model, optimizer)
    optimizer.zero_grad()
    model.between = [failing_late(optimizer)] if bps.rank() == 1 else []
    loss = model(torch.full((SIZE,), 1.0 + bps.rank()))
    with pytest.raises(ZeroDivisionError) if model.between else contextlib.nullcontext():
        loss.backward()
    model.between = []
    if bps.rank() == 1 and zeroes:
        with pytest.raises(bps.BpsError, match="zero_grad"):
            optimizer.zero_grad()
    is_told(late)
    del loss
    assert model.weights == [-1.5, -3]
    step(bps, model, optimizer)
    assert model.weights == [-3, -4.5]


@harness.on_ranks(workers=2)
def test_who_has_sent_nothing_outside_of_a_checkpoint_goes_on(bps: Any) -> None:
    model = Checkpointed()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer: Any = DistributedOptimizer(sgd, model.named_parameters(), strategy="flat")
    if bps.rank() == 1:
        model.between = [training.fail]
        loss = model(torch.full((SIZE,), 2.0))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model.between = []
        optimizer.zero_grad()
        del loss
    model(torch.full((SIZE,), 1.0 + bps.rank())).backward()
    optimizer.step()
    assert model.weights == [-1.5, -1.5]


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(2 * harness.PATIENCE)})
def test_a_late_rank_costs_cross_barrier_one_step(bps: Any) -> None:
    """And not one for each parameter."""
    model = Layers()
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0))
    step(bps, model, optimizer)
    if bps.rank() == 1:
        harness.await_mark("late", 0)
    backward(bps, model, optimizer)
    optimizer.step()
    with pytest.raises(bps.DeadlineError):
        step(bps, model, optimizer)
    harness.mark("late")
    step(bps, model, optimizer)
    assert model.weights == [-3] * LAYERS


@harness.on_ranks(workers=2)
def test_cross_barrier_keeps_nothing_of_a_failed_step(bps: Any) -> None:
    model = Layers()
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0))
    step(bps, model, optimizer)
    outputs = training.outputs_of(model)
    gc.disable()
    hook = model.all[1].weight.register_hook(failing_late(optimizer)) if bps.rank() == 1 else None
    errors = []
    try:
        step(bps, model, optimizer)
    except (ZeroDivisionError, bps.RefusedError) as error:
        errors.append(str(error))
        if hook:
            hook.remove()
            optimizer.step()
            try:
                optimizer.synchronize()
            except bps.BpsError as refused:
                errors.append(str(refused))
    assert len(errors) == 1 + bps.rank()
    assert len(outputs) == 1
    assert outputs[0]() is None

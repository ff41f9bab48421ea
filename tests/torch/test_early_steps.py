# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer before gradients are averaged, as in hooks of backward: each rank would use its own."""

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from strategies import every_strategy
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from bps_rdma.errors import BpsError
from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer, ShardedOptimizer

EARLY = r"an optimizer steps on the gradient of '.*' before it is averaged.*make the step .* when backward\(\) has ret"


def sgd_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def hide_what_there_is() -> None:
    """From the look through all objects that each DistributedOptimizer begins with: these tests make a hundred."""
    gc.freeze()


def wrapped_by(kind: Any, model: nn.Module, strategy: Any) -> tuple[nn.Module, Any]:
    if kind is DistributedDataParallel:
        return DistributedDataParallel(model, strategy=strategy), None
    return model, DistributedOptimizer(sgd_of(model), model.named_parameters(), strategy=strategy)


def one_for_each(model: nn.Module, after: Callable[[Any], None], waits_for: Any = (), lr: float = 0.1) -> None:
    """As a script does that keeps no gradients: an optimizer for each parameter, which steps in its hook."""
    for parameter in trained_of(model):
        own = torch.optim.SGD([parameter], lr=lr)

        def step(_: Any, own: Any = own) -> None:
            if waits_for in ((), [True]):
                own.step()
                after(own)

        parameter.register_post_accumulate_grad_hook(step)


def of_all(model: nn.Module, after: Callable[[Any], None]) -> None:
    """One optimizer steps in the hook of the parameter whose gradient comes last."""
    optimizer = sgd_of(model)

    def step(_: Any) -> None:
        optimizer.step()
        after(optimizer)

    trained_of(model)[0].register_post_accumulate_grad_hook(step)


def of_torch(model: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, trained_of(model), {"lr": 0.1})


def sharded(model: nn.Module) -> None:
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    trained_of(model)[-1].register_post_accumulate_grad_hook(lambda _: optimizer.step())


def keep(_: Any) -> None:
    pass


def zero(optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop(optimizer: Any) -> None:
    optimizer.zero_grad()


HOOKS: list[Callable[[nn.Module], None]] = [
    *(functools.partial(hook, after=after) for hook in (one_for_each, of_all) for after in (keep, zero, drop)),
    of_torch,
    sharded,
]


@every_strategy()
def test_a_step_in_a_hook_is_refused(bps: Any, strategy: str) -> None:
    """No weight has changed then."""
    hide_what_there_is()
    for kind in (DistributedDataParallel, DistributedOptimizer):
        for hook in HOOKS:
            model = training.seeded(training.Plain)
            wrapped, optimizer = wrapped_by(kind, model, strategy)
            hook(model)
            with pytest.raises(BpsError, match=EARLY):
                training.loss_of(wrapped(training.share_of(bps, 0))).backward()
            assert training.distance(model, training.seeded(training.Plain)) == 0
            bps.barrier()
            del wrapped, optimizer


class Scale(nn.Module):
    """One parameter: there is no other one whose gradient would begin a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@every_strategy()
def test_a_step_in_a_hook_from_before_the_wrapper_is_refused(bps: Any, strategy: str) -> None:
    """In the first pass, where the ranks compare their weights, it is one that changes none."""
    hide_what_there_is()
    kinds = (DistributedDataParallel, DistributedOptimizer)
    whens = ((keep, False), (zero, False), (drop, False), (drop, True))
    for kind, make, (after, is_first) in itertools.product(kinds, (Scale, training.Plain), whens):
        model, begins = training.seeded(make), [is_first]
        one_for_each(model, after, begins, lr=0.0 if is_first else 0.1)
        wrapped, optimizer = wrapped_by(kind, model, strategy)
        x = torch.full((2, 4 if make is Scale else 8), 1.0 + bps.rank())
        if not is_first:
            wrapped(x).sum().backward()
            begins[0] = True
            model.zero_grad()
        with pytest.raises(BpsError, match=EARLY):
            wrapped(x).sum().backward()
        bps.barrier()
        del wrapped, optimizer


@every_strategy()
def test_another_model_may_step_in_a_hook(bps: Any, strategy: str) -> None:
    """As one that learns from the gradients of this one."""
    for kind in (DistributedDataParallel, DistributedOptimizer):
        model, other = training.seeded(training.Plain), nn.Linear(8, 4)
        wrapped, optimizer = wrapped_by(kind, model, strategy)
        others, steps = sgd_of(other), []

        def learn(_: Any, other: Any = other, others: Any = others, steps: Any = steps) -> None:
            others.zero_grad()
            with torch.enable_grad():
                other(torch.full((1, 8), 1.0 + bps.rank())).sum().backward()
            others.step()
            steps.append(1)

        for parameter in trained_of(model):
            parameter.register_post_accumulate_grad_hook(learn)
        optimizer = sgd_of(model) if optimizer is None else optimizer
        for step in range(2):
            training.make_step(wrapped, optimizer, training.share_of(bps, step))
        assert training.same_everywhere(bps, model)
        assert len(steps) == 2 * len(trained_of(model))


@harness.on_ranks(workers=2)
def test_steps_in_hooks_on_own_gradients(bps: Any) -> None:
    """Inside of no_sync(), with hooks from before the wrapper and from after it; and of a rank that trains alone."""
    for is_first in (True, False):
        model = training.seeded(training.Plain)
        wrapped: Any = None if is_first else DistributedDataParallel(model)
        one_for_each(model, drop)
        wrapped = wrapped or DistributedDataParallel(model)
        with wrapped.no_sync():
            training.loss_of(wrapped(training.share_of(bps, 0))).backward()
        alone = training.seeded(training.Plain)
        training.loss_of(alone(training.share_of(bps, 0))).backward()
        sgd_of(alone).step()
        assert training.distance(alone, model) < 1e-6
    group = bps.new_group([bps.rank()])
    model = training.seeded(training.Plain)
    wrapped = DistributedDataParallel(model, group=group)
    one_for_each(model, keep)
    training.loss_of(wrapped(training.share_of(bps, 0))).backward()
    assert training.distance(training.seeded(training.Plain), model) > 0


@harness.on_ranks(workers=2)
def test_cross_barrier_makes_late_updates_while_a_pass_is_open(bps: Any) -> None:
    """The update of a layer that the first of two forwards does not use."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, uses: str = "both") -> torch.Tensor:
            found = [each(x) for name, each in self.named_children() if uses in ("both", name)]
            return sum(found, torch.zeros(()))

    model, alone = training.seeded(Two), training.seeded(Two)
    optimizer: Any = CrossBarrier(model, sgd_of(model), model.named_parameters())
    plain = sgd_of(alone)
    for step in range(2):
        for each, own, x in ((model, optimizer, training.share_of(bps, step)), (alone, plain, training.batch(step))):
            own.zero_grad()
            for uses in ("first", "last") if step else ("both",):
                training.loss_of(each(x, uses)).backward()
            own.step()
    optimizer.synchronize()
    assert training.distance(alone, model) < 1e-5


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> Any:
        raise ZeroDivisionError


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(Fails.apply(self.first(x)))
        return found


@every_strategy()
def test_a_step_after_a_backward_that_has_failed_is_refused(bps: Any, strategy: Any) -> None:
    """Until the gradients are dropped, or the wrapper is."""
    model: Any = DistributedDataParallel(training.seeded(Broken), strategy=strategy, bucket_mb=0.0001)
    optimizer = sgd_of(model)
    with pytest.raises(ZeroDivisionError):
        training.loss_of(model(training.share_of(bps, 0))).backward()
    with pytest.raises(
        BpsError, match=r"'last\..*' before it is averaged.*call finish_gradient_synchronization\(\); if"
    ):
        optimizer.step()
    assert training.distance(model.module, training.seeded(Broken)) == 0
    optimizer.zero_grad()
    optimizer.step()
    bps.barrier()
    drop_with_an_open_pass(bps, strategy)


def drop_with_an_open_pass(bps: Any, strategy: Any) -> None:
    """A wrapper ends with its references, and steps of others are looked at as before."""
    model = DistributedDataParallel(training.seeded(Broken), strategy=strategy, bucket_mb=0.0001)
    with pytest.raises(ZeroDivisionError):
        training.loss_of(model(training.share_of(bps, 0))).backward()
    ended = weakref.ref(model)
    del model
    gc.collect()
    assert ended() is None
    other = nn.Linear(8, 4)
    other(training.share_of(bps, 0)).sum().backward()
    sgd_of(other).step()
    bps.barrier()

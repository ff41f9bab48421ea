# SPDX-License-Identifier: Apache-2.0
"""Gradients that a script keeps, gives other memory, or drops: the next means are right, or an error names one."""

import functools
from collections.abc import Callable
from typing import Any

import harness
import pytest
import simulated
import torch
import training
from torch import nn
from wraps import plain, wraps

from bps_rdma.torch import holders

KEPT: list[Callable[[Any], Any]] = [lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad.detach()]


def two_tasks(model: nn.Module, optimizer: Any, samples: Callable[[int], torch.Tensor], keep: Any) -> None:
    """Trains on a combination of two gradients, as scripts for several tasks do, without copies of the first one."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for step in range(4):
        found = []
        for loss_of in (training.loss_of, lambda out: out.abs().mean()):
            optimizer.zero_grad()
            loss_of(model(samples(step))).backward()
            found.append([None if each.grad is None else keep(each.grad) for each in parameters])
        for parameter, one, other in zip(parameters, *found, strict=True):
            parameter.grad = None if one is None else (one - 0.5 * other).view_as(parameter)
        optimizer.step()


def compare(bps: Any, make: Callable[[], nn.Module], train: Callable[..., None]) -> None:
    """The model that ranks train in each way with the one that is trained alone."""
    alone = training.seeded(make)
    train(*plain(alone), training.batch)
    for name, wrap in wraps(bps).items():
        model = training.seeded(make)
        train(*wrap(model), lambda step: training.share_of(bps, step))
        assert training.distance(alone, model) < 1e-5, name


def kept(bps: Any) -> None:
    for keep in KEPT:
        compare(bps, training.Plain, functools.partial(two_tasks, keep=keep))


def moved(model: nn.Module, optimizer: Any, samples: Callable[[int], torch.Tensor]) -> None:
    """Gives gradients other memory, by itself and as Module.to() does; some are kept, and added to."""
    for step in range(6):
        if step == 3:
            model.to(memory_format=torch.channels_last)
        if step % 2:
            optimizer.zero_grad()
        training.loss_of(model(samples(step))).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 0.5
        optimizer.step()


@harness.on_ranks(workers=2)
def test_kept_gradients_stay_beside_those_that_get_other_memory(bps: Any) -> None:
    """Keeps as many gradients as it gives other memory."""
    for number, keep in enumerate(KEPT[1:]):
        for name, wrap in wraps(bps).items():
            trained = training.seeded(training.Plain)
            model, optimizer = wrap(trained)
            found, then = [], []
            for step in range(4):
                optimizer.zero_grad()
                training.loss_of(model(training.share_of(bps, step))).backward()
                for parameter in trained.parameters():
                    if parameter.grad is not None:
                        found.append(keep(parameter.grad))
                        then.append(found[-1].clone())
                        parameter.grad.data = parameter.grad.data / 2
                optimizer.step()
            assert all(torch.equal(*each) for each in zip(found, then, strict=True)), (number, name)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(2, 6, 2), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return self.last(self.convolution(x.view(-1, 2, 2, 2)).flatten(1))


def moving(bps: Any) -> None:
    compare(bps, Pixels, moved)


def zeroed(model: nn.Module, optimizer: Any, samples: Callable[[int], torch.Tensor]) -> None:
    """Zeroes gradients in place, after a detach_(), as optimizers did before torch 1.7, and some still do."""
    for step in range(4):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        training.loss_of(model(samples(step))).backward()
        optimizer.step()


def zeroing(bps: Any) -> None:
    compare(bps, Pixels, zeroed)


def on_a_device(bps: Any) -> None:
    simulated.install(immediate=True)
    kept(bps)
    moving(bps)
    zeroing(bps)


def with_an_old_torch(bps: Any) -> None:
    """Built for CPUs alone, it does not tell how many tensors share memory."""
    holders.CAN_TELL = False
    kept(bps)


@pytest.mark.parametrize("body", [kept, moving, zeroing, on_a_device, with_an_old_torch])
def test_gradients_are_those_of_one_process(body):
    harness.run(body, workers=2)

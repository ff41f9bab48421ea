# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a step() of DiLoCo that waits for a mean: the other ranks get it, and so does this one, later."""

from __future__ import annotations

import signal
from typing import Any

import harness
import pytest
import torch
from harness import await_mark, mark
from torch import nn

from bps_rdma.torch import DiLoCo


class Trained:
    """A weight from which each rank subtracts its number, counted from one, in a step."""

    def __init__(self, bps: Any, fragments: int) -> None:
        self._number = 1.0 + bps.rank()
        self.model = nn.ParameterList(torch.zeros(8) for _ in range(fragments))
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = DiLoCo(sgd, every=1, outer_lr=1.0, outer_momentum=0.0, fragments=fragments)

    def step(self) -> None:
        self.optimizer.zero_grad()
        sum(each.sum() * self._number for each in self.model).backward()  # type: ignore[union-attr]
        self.optimizer.step()

    @property
    def weights(self) -> list[float]:
        return [float(each.detach()[0]) for each in self.model]


def interrupted(bps: Any, fragments: int) -> list[float]:
    trained = Trained(bps, fragments)
    trained.step()
    if bps.rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mark("waiting")
        with pytest.raises(KeyboardInterrupt):
            trained.step()
        mark("interrupted")
        for one in trained.model:
            one.grad = None
        trained.optimizer.synchronize()
    else:
        await_mark("interrupted", 0)
        trained.step()
    assert trained.weights == [-3.0] * fragments
    trained.step()
    return trained.weights


@pytest.mark.parametrize("fragments", [1, 3])
def test_who_is_interrupted_takes_the_mean_later(fragments: int) -> None:
    with harness.start(interrupted, fragments, workers=2) as job:
        job.interrupt("waiting")
        assert job.results() == [[-4.5] * fragments] * 2


def interrupted_and_goes_on(bps: Any) -> list[float]:
    trained = Trained(bps, 2)
    trained.step()
    if bps.rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mark("waiting")
        with pytest.raises(KeyboardInterrupt):
            trained.step()
        mark("interrupted")
    else:
        await_mark("interrupted", 0)
        trained.step()
    trained.step()
    return trained.weights


def test_the_next_step_takes_it_first() -> None:
    with harness.start(interrupted_and_goes_on, workers=2) as job:
        job.interrupt("waiting")
        assert job.results() == [[-4.5] * 2] * 2

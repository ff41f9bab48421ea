# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a step() of DiLoCo that waits for a mean: the other ranks get it, and so does this one, later."""

from typing import Any

import harness
import pytest
import torch
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


@pytest.mark.parametrize(("fragments", "waits_again"), [(1, True), (3, True), (2, False)])
@harness.on_ranks(workers=2, interrupts=True)
def test_who_is_interrupted_takes_the_mean_later(bps: Any, fragments: int, waits_again: bool) -> None:
    """By a call of its own, or by the next step."""
    trained = Trained(bps, fragments)
    trained.step()
    if bps.rank() == 0:
        harness.is_interrupted(trained.step)
    else:
        harness.await_mark("interrupted", 0)
        trained.step()
    if waits_again:
        if bps.rank() == 0:
            trained.model.zero_grad()
            trained.optimizer.synchronize()
        assert trained.weights == [-3.0] * fragments
    trained.step()
    assert trained.weights == [-4.5] * fragments

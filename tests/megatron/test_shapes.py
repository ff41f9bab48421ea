# SPDX-License-Identifier: Apache-2.0
"""Activations that change their shape under --use-dpu-tp-reduce: every size is summed as stock does."""

from dataclasses import replace
from typing import Any

import cpu
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup, Trained, Training

from bps_rdma import megatron


class Varied(Training):
    """Microbatches of any size, and evaluations in between."""

    def feed(self, length: int, *samples: int) -> None:
        """The next microbatches have so many samples each."""
        self.setup = replace(self.setup, length=length, microbatches=len(samples))
        generator = torch.Generator().manual_seed(length)
        self._data = [
            iter([torch.randint(0, self.setup.words, (count, length + 1), generator=generator) for count in samples])
        ]

    def evaluate(self) -> None:
        """Its losses are noted among those of training."""
        self.model[0].eval()
        with torch.no_grad():
            found = self.run(forward_only=True)
        self.model[0].train()
        self.losses += [float(one["loss"]) for one in found]


def train(setup: Setup) -> Trained:
    training = Varied(setup)
    for _ in range(2):
        for length, samples in ((16, (2, 2, 1)), (16, (1,)), (8, (3, 2))):
            training.feed(length, *samples)
            training.step()
            training.feed(12, 5, 4)
            training.evaluate()
    result = training.result()
    training.close()
    return result


def stock_and_ours(bps: Any, setup: Setup) -> tuple[Trained, Trained, int]:
    cpu.install()
    dist.init_process_group("gloo")
    stock = train(setup)
    with megatron.enabled(use_dpu_reduce=False, use_dpu_tp_reduce=True) as on:
        assert on
        ours = train(setup)
    operations = bps.metrics()["total"]["operations"]
    return stock, ours, operations


@pytest.mark.parametrize(
    "setup", [pytest.param(Setup(tp=2), marks=pytest.mark.long), Setup(tp=2, sp=True)], ids=["tp", "sequence parallel"]
)
def test_shapes_that_change(setup):
    for stock, ours, operations in harness.run(stock_and_ours, setup, workers=2, init=False):
        assert ours == stock
        assert len(stock.losses) == 6 * (1 + 2)
        assert operations > 18 * setup.layers

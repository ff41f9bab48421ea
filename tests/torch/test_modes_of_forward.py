# SPDX-License-Identifier: Apache-2.0
"""What is done inside a forward does not depend on the mode in which that runs: inference, autocast."""

import contextlib
from collections.abc import Callable
from typing import Any

import harness
import torch
import training
from torch import nn

from bps_rdma.torch import CrossBarrier, DiLoCo, DistributedDataParallel, DistributedOptimizer, ShardedOptimizer

Mode = Callable[[], Any]
MODES: dict[str, Mode] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),  # multiplies matrices
}


class Counting(training.Plain):
    """Has a buffer that its forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return super().forward(x + 0 * self.seen(x))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def train(model: nn.Module, optimizer: Any, samples: Callable[[int], torch.Tensor], mode: Mode) -> torch.Tensor:
    """Looks at the model in a mode, between steps."""
    for step in range(4):
        batch = samples(step)
        training.make_step(model, optimizer, batch)
        if step != 2:
            model.eval()
            with mode():
                model(batch)
            model.train()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    return weights(model)


@harness.on_ranks(workers=2)
def test_late_updates_are_those_of_a_step_outside(bps: Any) -> None:
    for mode_name, mode in MODES.items():
        for name, make in OPTIMIZERS.items():
            alone, model = training.seeded(training.Plain), training.seeded(training.Plain)
            expected = train(alone, make(alone.parameters()), training.batch, contextlib.nullcontext)
            optimizer = CrossBarrier(model, make(model.parameters()))
            try:
                found = train(model, optimizer, lambda step: training.share_of(bps, step), mode)
            except Exception as error:
                raise AssertionError(f"{name} in {mode_name}") from error
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"{name} in {mode_name}")
            assert not any(each.is_inference() for state in optimizer.state.values() for each in state.values())


@harness.on_ranks(workers=2)
def test_late_updates_are_not_rounded_under_autocast(bps: Any) -> None:
    """Forward passes in training run under autocast; only the first step can differ by its rounding."""
    found = []
    for late in (False, True):
        model = training.seeded(training.Plain)
        optimizer: Any = OPTIMIZERS["Adafactor"](model.parameters())
        optimizer = CrossBarrier(model, optimizer) if late else DistributedOptimizer(optimizer, strategy="overlap")
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(training.share_of(bps, step))
            training.loss_of(output.float()).backward()
            optimizer.step()
        optimizer.synchronize()
        found.append(weights(model))
    assert torch.equal(*found)


@harness.on_ranks(workers=2)
def test_a_look_at_a_model_changes_no_wrapper(bps: Any) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS["SGD"](model.parameters())

    for mode in MODES.values():
        results = []
        for wrap in (
            lambda model: (model, sgd(model)),
            lambda model: (ddp := DistributedDataParallel(model), sgd(ddp)),
            lambda model: (model, DistributedOptimizer(sgd(model))),
            lambda model: (model, DiLoCo(sgd(model), every=1, outer_lr=1.0, outer_momentum=0.0)),
            lambda model: (
                ddp := DistributedDataParallel(model),
                ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
            ),
        ):
            model, optimizer = wrap(training.seeded(Counting))
            samples = training.batch if not results else lambda step: training.share_of(bps, step)
            results.append(train(model, optimizer, samples, mode))
            state = getattr(optimizer, "inner", optimizer).state.values()
            assert not any(
                isinstance(each, torch.Tensor) and each.is_inference() for one in state for each in one.values()
            )
        for found in (results[1], results[2], results[4]):  # DiLoCo has a momentum on each rank
            torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-6)

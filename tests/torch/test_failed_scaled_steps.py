# SPDX-License-Identifier: Apache-2.0
"""A step() under torch's GradScaler fails and is called again: gradients lose their scale once."""

from typing import Any
from unittest import mock

import harness
import pytest
import torch
from torch import nn

from bps_rdma.torch import DiLoCo, DistributedOptimizer
from bps_rdma.torch.optimizer import SynchronousOptimizer
from bps_rdma.torch.wrapping import scaled_step

LR, STEPS = 0.5, 5


class Trained:
    """A linear model whose ranks have gradients of 1 and 3, and a GradScaler."""

    def __init__(self, bps: Any, kind: str, fused: bool = False) -> None:
        self._x = torch.full((1, 4), 1.0 + 2 * bps.rank())
        self.model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=LR, fused=fused)
        named = self.model.named_parameters()
        if kind == "diloco":
            self.optimizer: Any = DiLoCo(self.inner, named, every=1, outer_lr=1.0, outer_momentum=0.0)
        else:
            self.optimizer = DistributedOptimizer(self.inner, named)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self._x).sum()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def fail_in_the_optimizer(bps: Any, kind: str, fused: bool = False) -> float:
    """Returns what all steps have changed."""
    trained, fails = Trained(bps, kind, fused), []

    def fail(*_: Any) -> None:
        if fails:
            fails.clear()
            raise ZeroDivisionError("on purpose")

    trained.inner.register_step_pre_hook(fail)
    for step in range(STEPS):
        trained.backward()
        if step == 2 and bps.rank() == 1:
            fails.append("now")
            with pytest.raises(ZeroDivisionError):
                trained.step()
        trained.step()
    weight = trained.model.weight
    assert weight.eq(weight[0, 0]).all()
    return float(weight[0, 0])


@pytest.mark.parametrize(("kind", "fused"), [("diloco", False), ("diloco", True), ("plain", False), ("plain", True)])
def test_the_optimizer_fails_once(kind: str, fused: bool) -> None:
    assert harness.run(fail_in_the_optimizer, kind, fused, workers=2) == [-LR * 2 * STEPS] * 2


def test_the_optimizer_fails_once_where_servers_keep_the_weights() -> None:
    env = {"BPS_ASYNC": "1", "BPS_STALENESS": "0"}
    assert harness.run(fail_in_the_optimizer, "plain", workers=2, env=env) == [-LR * 4 * STEPS] * 2


@pytest.mark.parametrize(
    ("kind", "where", "what"), [("diloco", DiLoCo, "_agree"), ("plain", SynchronousOptimizer, "_synchronize_once")]
)
@harness.on_ranks(workers=2)
def test_ranks_do_not_meet_in_a_step(bps: Any, kind: str, where: type, what: str) -> None:
    """What the scaler has given the optimizer is not there any more in the next step."""
    trained = Trained(bps, kind, fused=True)
    trained.backward()

    def late(fragments: Any = ()) -> None:
        for one in fragments:
            one.wait()
        raise bps.DeadlineError("on purpose", "")

    with mock.patch.object(where, what, side_effect=late), pytest.raises(bps.DeadlineError):
        trained.step()
    before = trained.model.weight[0, 0].item()
    trained.scaler.update()
    trained.backward()
    trained.step()
    assert trained.model.weight[0, 0].item() < before - LR / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_failed_step_leaves_small_gradients_as_they_were(dtype: torch.dtype) -> None:
    """Divided by the scale they may be too small for their dtype."""
    asked, weight = mock.Mock(grad_scale=torch.tensor(65536.0), found_inf=torch.tensor(0.0)), torch.zeros(2)
    weight = weight.to(dtype)
    weight.grad = torch.tensor([1e-3, 7.0], dtype=dtype)
    before = weight.grad.clone()
    with pytest.raises(ZeroDivisionError):
        scaled_step(asked, mock.Mock(side_effect=ZeroDivisionError), [weight])
    assert weight.grad.equal(before)

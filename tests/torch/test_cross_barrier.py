# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier, whose updates are late: what comes between step() and the next forward does not change them."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from torch import nn

import bps_rdma
from bps_rdma.torch import CrossBarrier, holders

Between = Callable[[nn.Module, Any], None]
Make = Callable[[Any], torch.optim.Optimizer]


def train(model: nn.Module, optimizer: Any, samples: Callable[[int], torch.Tensor], between: Between) -> None:
    for step in range(4):
        training.make_step(model, optimizer, samples(step))
        between(model, optimizer)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rate_in_a_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=torch.tensor(0.1), foreach=False)


def slower(_: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)


def saved(model: nn.Module, _: Any) -> None:
    model.kept.append([each.clone() for each in model.state_dict().values()])


def loaded(model: nn.Module, _: Any) -> None:
    model.load_state_dict({name: each * 0.5 for name, each in model.state_dict().items()})


def weights_loaded(model: nn.Module, _: Any) -> None:
    model.load_state_dict(training.seeded(type(model), 3).state_dict())


def state_loaded(_: nn.Module, optimizer: Any) -> None:
    state = copy.deepcopy(torch.optim.Optimizer.state_dict(optimizer))
    for each in state["state"].values():
        each["momentum_buffer"].zero_()
    optimizer.load_state_dict(state)


def nothing(_: nn.Module, __: Any) -> None:
    pass


class Keeping(training.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []


def of_weight_norm() -> nn.Module:
    model = Keeping()
    nn.utils.weight_norm(model.first)
    return model


CASES: list[tuple[Callable[[], nn.Module], Make, Between]] = [
    (Keeping, rate_in_a_tensor, slower),
    (Keeping, momentum, saved),
    (Keeping, momentum, loaded),
    (Keeping, momentum, weights_loaded),
    (Keeping, momentum, state_loaded),
    (of_weight_norm, momentum, nothing),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@harness.on_ranks(workers=2)
def test_late_updates_are_those_of_their_step(bps: Any) -> None:
    for make, optimizer_of, between in CASES:
        alone, model = training.seeded(make), training.seeded(make)
        train(alone, optimizer_of(alone.parameters()), training.batch, between)
        optimizer = CrossBarrier(model, optimizer_of(model.parameters()))
        train(model, optimizer, lambda step: training.share_of(bps, step), between)
        optimizer.synchronize()
        assert training.distance(alone, model) < 1e-5, between
        for ones, others in zip(model.kept, alone.kept, strict=True):
            for one, other in zip(ones, others, strict=True):
                torch.testing.assert_close(one, other)


class Waiting(torch.optim.SGD):
    """Its first update in another thread lasts until the main thread makes one, or for a moment if that waits."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.begins, self.meets = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        """Makes an update."""
        if threading.current_thread() is threading.main_thread():
            self.meets.set()
        elif not self.begins.is_set():
            self.begins.set()
            self.meets.wait(0.2)
        return super().step(closure)


@pytest.mark.parametrize("bias", [True, False])
@harness.on_ranks(workers=2)
def test_another_thread_may_save_while_this_one_trains(bps: Any, bias: bool) -> None:
    """It may also be at the last update that is due."""
    alone, model = (training.seeded(functools.partial(nn.Linear, 8, 4, bias=bias)) for _ in range(2))
    right: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    threads: list[threading.Thread] = []

    def save(net: nn.Module, optimizer: Any) -> None:
        if not threads:
            optimizer.meets.clear()
            threads.append(threading.Thread(target=net.state_dict))
            threads[0].start()
            assert optimizer.begins.wait(60)
            found.append(net(training.batch(0)).detach())

    train(alone, momentum(alone.parameters()), training.batch, lambda net, _: right.append(net(training.batch(0))))
    optimizer: Any = CrossBarrier(model, Waiting(model.parameters()))
    train(model, optimizer, lambda step: training.share_of(bps, step), save)
    threads[0].join()
    optimizer.synchronize()
    torch.testing.assert_close(found[0], right[0].detach(), rtol=0, atol=1e-5)
    assert training.distance(alone, model) < 1e-5


class Counting(torch.optim.Optimizer):
    """Divides the learning rate by the number of the step, which it keeps among its options."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for each in group["params"]:
                each.add_(each.grad, alpha=-group["lr"] / group["count"])


@harness.on_ranks(workers=2)
def test_optimizers_that_need_whole_steps_are_refused(bps: Any) -> None:
    model = nn.Linear(8, 4)
    optimizer = CrossBarrier(model, Counting(model.parameters()))
    model(training.batch(0)).sum().backward()
    optimizer.step()
    with pytest.raises(bps_rdma.BpsError, match=r"option 'count' in step\(\).*DistributedOptimizer"):
        optimizer.synchronize()
    model = nn.Linear(8, 4)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.register_step_post_hook(lambda *_: None)
    model(training.batch(0)).sum().backward()
    with pytest.raises(bps_rdma.BpsError, match=r"hooks of step\(\).*DistributedOptimizer"):
        optimizer.step()
    bps.barrier()


@pytest.mark.skipif(not holders.CAN_TELL, reason="this torch cannot tell who shares memory")
@harness.on_ranks(workers=2)
def test_weights_that_change_before_their_update_are_told(bps: Any) -> None:
    """As those that a script clamps after step(): the update would come after that."""
    for whole in (False, True):
        model = nn.Linear(8, 4)
        optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(training.batch(0)).sum().backward()
        optimizer.step()
        if whole:
            optimizer.synchronize()
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)
        if whole:
            model(training.batch(0))
        else:
            with pytest.raises(bps_rdma.BpsError, match=r"'weight' was changed .*synchronize\(\) after step"):
                model(training.batch(0))
            optimizer.synchronize()
    bps.barrier()


@harness.on_ranks(workers=2)
def test_weights_that_no_update_changes_may_change(bps: Any) -> None:
    """No rank has used the one, and the update of the other one's memory comes first."""
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=True)
    model["used"](training.batch(0)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model["other"].weight.clamp_(-0.1, 0.1)
    optimizer.synchronize()
    optimizer.zero_grad()

    model["other"].weight = nn.Parameter(model["used"].weight)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (model["used"](training.batch(0)) + model["other"](training.batch(0))).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    bps.barrier()


@harness.on_ranks(workers=2)
def test_a_rank_that_ends_gives_the_others_their_last_gradients(bps: Any) -> None:
    """Rank 0 leaves right after step(), as scripts do, and rank 1 has yet to compute its last gradients."""
    alone, model = training.seeded(training.Plain), training.seeded(training.Plain)
    train(alone, momentum(alone.parameters()), training.batch, nothing)
    optimizer = CrossBarrier(model, momentum(model.parameters()))

    def samples(step: int) -> torch.Tensor:
        if step == 3 and bps.rank() == 1:
            harness.await_mark("leaves", 0)
        return training.share_of(bps, step)

    train(model, optimizer, samples, nothing)
    if bps.rank() == 0:
        harness.mark("leaves")
    bps_rdma.shutdown()
    assert training.distance(alone, model) < 1e-5

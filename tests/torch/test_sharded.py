# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer: the trajectory of the optimizer it stands for, bit by bit, with 1/N of its state on each rank."""

from typing import Any

import harness
import pytest
import torch
from sharded_model import CASES, Model, assert_same, assert_same_models, backward, bytes_of_state, train

from bps_rdma.torch import ShardedOptimizer

# ---- The same trajectory


def follows(bps: Any, which: str, dtype: torch.dtype) -> None:
    cls, options = CASES[which]
    reference, model = Model(dtype), Model(dtype)
    plain = cls(reference.parameters(), **options)
    sharded = ShardedOptimizer(model.parameters(), cls, **options)
    assert sharded.defaults == plain.defaults
    for steps in (range(2), range(2, 5)):
        train(reference, plain, steps)
        train(model, sharded, steps)
        assert_same_models(model, reference)
        assert_same(sharded.state_dict(), plain.state_dict())


@pytest.mark.parametrize("which", CASES)
def test_the_trajectory_of_the_plain_optimizer(which):
    harness.run(follows, which, torch.float32, workers=2)


@pytest.mark.parametrize(("workers", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (4, torch.float64)])
def test_other_worlds_and_dtypes(workers, dtype):
    harness.run(follows, "adamw", dtype, workers=workers)


@harness.on_ranks(workers=3)
def test_parameters_that_are_not_contiguous_empty_complex_or_of_no_dimension(bps: Any) -> None:
    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        wide = torch.randn(300, 200, generator=generator)
        found = [wide.t(), torch.randn(7, 3, generator=generator).t(), torch.randn((), generator=generator)]
        return [torch.nn.Parameter(each) for each in [*found, torch.empty(0), torch.ones(3, dtype=torch.complex64)]]

    reference, params = make(), make()
    plain = torch.optim.Adam(reference, lr=0.1)
    sharded = ShardedOptimizer(params, torch.optim.Adam, lr=0.1)
    for step in range(3):
        for each in (reference, params):
            for place, param in enumerate(each):
                generator = torch.Generator().manual_seed(10 * step + place)
                param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        places = [param.data_ptr() for param in params]
        plain.step()
        sharded.step()
        assert_same(params, reference)
        assert places == [param.data_ptr() for param in params]


def more_ranks_than_parameters(bps: Any) -> int:
    parameter, reference = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    sharded = ShardedOptimizer([parameter], torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam([reference], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sharded, 1, gamma=0.5)
    theirs = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    for _ in range(3):
        parameter.grad = reference.grad = torch.arange(3.0)
        sharded.step()
        plain.step()
        scheduler.step()
        theirs.step()
    assert_same([parameter], [reference])
    assert_same(sharded.state_dict(), plain.state_dict())
    return len(sharded.state)


def test_ranks_that_own_nothing():
    assert sorted(harness.run(more_ranks_than_parameters, workers=3)) == [0, 0, 1]


@harness.on_ranks(workers=2)
def test_gradients_that_only_some_ranks_have(bps: Any) -> None:
    """A gradient that is None on the owner leaves the parameter alone, also where another rank has one."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    sharded = ShardedOptimizer(params, torch.optim.SGD, lr=1.0)
    params[bps.rank()].grad = torch.ones(4)
    owned = sharded._shards.mine(params)
    assert len(owned) == 1
    sharded.step()
    mine = params[bps.rank()]
    assert torch.equal(mine.detach(), torch.full((4,), -1.0 if mine is owned[0] else 0.0))


# ---- Groups, schedulers, closures, hooks


@harness.on_ranks(workers=2)
def test_groups_added_later_and_options_that_change(bps: Any) -> None:
    def make(wrap: bool) -> tuple[Model, Any, Any]:
        model = Model()
        options = {"lr": 0.01, "weight_decay": 0.1}
        groups = [{"params": model.first.parameters(), "lr": 0.02}, {"params": model.third.named_parameters()}]
        groups = [{**group, "params": [p for _, p in g] if (g := list(group["params"])) and isinstance(g[0], tuple)
                   else g} for group in groups]  # fmt: skip
        make_it = (lambda g: ShardedOptimizer(g, torch.optim.AdamW, **options)) if wrap else (
            lambda g: torch.optim.AdamW(g, **options))  # fmt: skip
        optimizer = make_it(groups)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05], total_steps=12)
        return model, optimizer, scheduler

    found = []
    for wrap in (False, True):
        model, optimizer, scheduler = make(wrap)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.3, "betas": (0.5, 0.9)})
        optimizer.add_param_group({"params": model.unused.weight})
        for step in range(3, 6):
            train(model, optimizer, range(step, step + 1))
            optimizer.param_groups[2]["lr"] *= 0.5
        found.append((model, optimizer.state_dict()))
    assert_same_models(found[1][0], found[0][0])
    assert_same(found[1][1], found[0][1])


@harness.on_ranks(workers=2)
def test_named_parameters(bps: Any) -> None:
    model, reference = Model(), Model()
    sharded = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.named_parameters(), lr=0.1, momentum=0.9)
    train(model, sharded, range(2))
    train(reference, plain, range(2))
    assert_same(sharded.state_dict(), plain.state_dict())
    assert sharded.state_dict()["param_groups"][0]["param_names"][1] == "first.weight"


class CountsInItsGroup(torch.optim.SGD):
    """An optimizer that keeps something in its options, as some do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] *= 0.9
        return super().step(closure)


@harness.on_ranks(workers=2)
def test_closures_hooks_and_options_that_the_optimizer_changes(bps: Any) -> None:
    model, reference = Model(), Model()
    sharded = ShardedOptimizer(model.parameters(), CountsInItsGroup, lr=0.1)
    plain = CountsInItsGroup(reference.parameters(), lr=0.1)
    seen: list[str] = []
    sharded.register_step_pre_hook(lambda *_: seen.append("pre"))
    sharded.register_step_post_hook(lambda *_: seen.append("post"))
    sharded.register_state_dict_post_hook(lambda _, state: {**state, "added": len(state["state"])})
    for step in range(3):
        losses = []
        for each, optimizer in ((model, sharded), (reference, plain)):

            def closure(each: Any = each, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                return backward(each, step)

            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)
    assert_same_models(model, reference)
    assert seen == ["pre", "post"] * 3
    assert sharded.param_groups[0]["k"] == 3
    assert sharded.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    whole = sharded.state_dict()
    assert whole["added"] == len(whole["state"])
    sharded.zero_grad()
    assert all(param.grad is None for param in model.parameters())


# ---- What it is for: memory, balance


def measures_state(bps: Any) -> tuple[int, int]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(100, 100 + 5 * i) for i in range(12)]
    params = [param for layer in layers for param in layer.parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for param in copies:
        param.grad = torch.ones_like(param)
    plain = torch.optim.Adam(copies)
    plain.step()
    sharded = ShardedOptimizer(params, torch.optim.Adam)
    sharded.step()
    return bytes_of_state(sharded), bytes_of_state(plain)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 4])
def test_each_rank_has_its_share_of_the_state(workers):
    found = harness.run(measures_state, workers=workers)
    whole = found[0][1]
    assert sum(own for own, _ in found) == whole
    assert max(own for own, _ in found) < 1.1 * whole / workers


@harness.on_ranks(workers=2)
def test_what_is_frozen_does_not_weigh_on_what_has_state(bps: Any) -> None:
    sizes = [1000, 10, 10, 990, 20, 5]
    params = [torch.nn.Parameter(torch.zeros(size), requires_grad=place % 2 == 0) for place, size in enumerate(sizes)]
    sharded = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    mine = sharded._shards.mine(params)
    trainable, frozen = (sum(p.numel() for p in mine if p.requires_grad == trained) for trained in (True, False))
    assert (trainable, frozen) == [(1000, 990), (30, 15)][bps.rank()]

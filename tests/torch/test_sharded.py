# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer: the trajectory of the optimizer it stands for, bit by bit, with 1/N of its state on each rank."""

from __future__ import annotations

import copy
import time
from typing import Any

import cluster
import pytest
import torch
from rank_main import await_mark, mark

import bps_rdma.torch as bps_torch
from bps_rdma.torch import ShardedOptimizer

pytestmark = pytest.mark.timeout(300)

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(1.5 * cluster.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(2 * cluster.PATIENCE)}
SOON_S = 5.0 * cluster.PATIENCE

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
}


class Model(torch.nn.Module):
    """Parameters on both sides of the size below which they travel together, one never used, one frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(20, 900)  # 72 kB
        self.second = torch.nn.Linear(900, 30)  # 108 kB
        self.third = torch.nn.Linear(30, 4)
        self.unused = torch.nn.Linear(7, 7)
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) + self.frozen[0]


def backward(model: torch.nn.Module, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step)).to(parameter.dtype)
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Dicts, lists and tensors, bit by bit."""
    assert type(left) is type(right) or isinstance(left, torch.Tensor), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left.detach(), right.detach()), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key, value in left.items():
            assert_same(value, right[key], f"{where} {key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for place, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where} {place}")
    else:
        assert left == right, where


def assert_same_models(left: torch.nn.Module, right: torch.nn.Module) -> None:
    assert_same(dict(left.state_dict()), dict(right.state_dict()))


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
    cluster.run(follows, which, torch.float32, workers=2)


@pytest.mark.parametrize(("workers", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (4, torch.float64)])
def test_other_worlds_and_dtypes(workers, dtype):
    cluster.run(follows, "adamw", dtype, workers=workers)


def odd_parameters(bps: Any) -> None:
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


def test_parameters_that_are_not_contiguous_empty_complex_or_of_no_dimension():
    cluster.run(odd_parameters, workers=3)


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
    assert sorted(cluster.run(more_ranks_than_parameters, workers=3)) == [0, 0, 1]


def gradients_on_some_ranks(bps: Any) -> None:
    """A gradient that is None on the owner leaves the parameter alone, also where another rank has one."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    sharded = ShardedOptimizer(params, torch.optim.SGD, lr=1.0)
    params[bps.rank()].grad = torch.ones(4)
    owned = sharded._shards.mine(params)
    assert len(owned) == 1
    sharded.step()
    mine = params[bps.rank()]
    assert torch.equal(mine.detach(), torch.full((4,), -1.0 if mine is owned[0] else 0.0))


def test_gradients_that_only_some_ranks_have():
    cluster.run(gradients_on_some_ranks, workers=2)


# ---- Groups, schedulers, closures, hooks


def groups_and_schedulers(bps: Any) -> None:
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


def test_groups_added_later_and_options_that_change():
    cluster.run(groups_and_schedulers, workers=2)


def named_parameters(bps: Any) -> None:
    model, reference = Model(), Model()
    sharded = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.named_parameters(), lr=0.1, momentum=0.9)
    train(model, sharded, range(2))
    train(reference, plain, range(2))
    assert_same(sharded.state_dict(), plain.state_dict())
    assert sharded.state_dict()["param_groups"][0]["param_names"][1] == "first.weight"


def test_named_parameters():
    cluster.run(named_parameters, workers=2)


class CountsInItsGroup(torch.optim.SGD):
    """An optimizer that keeps something in its options, as some do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] *= 0.9
        return super().step(closure)


def closures_and_hooks(bps: Any) -> None:
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


def test_closures_hooks_and_options_that_the_optimizer_changes():
    cluster.run(closures_and_hooks, workers=2)


# ---- What it is for: memory, balance


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


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


@pytest.mark.parametrize("workers", [2, 4])
def test_each_rank_has_its_share_of_the_state(workers):
    found = cluster.run(measures_state, workers=workers)
    whole = found[0][1]
    assert sum(own for own, _ in found) == whole
    assert max(own for own, _ in found) < 1.1 * whole / workers


def frozen_and_trainable(bps: Any) -> tuple[int, int]:
    sizes = [1000, 10, 10, 990, 20, 5]
    params = [torch.nn.Parameter(torch.zeros(size), requires_grad=place % 2 == 0) for place, size in enumerate(sizes)]
    sharded = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
    mine = sharded._shards.mine(params)
    return sum(p.numel() for p in mine if p.requires_grad), sum(p.numel() for p in mine if not p.requires_grad)


def test_what_is_frozen_does_not_weigh_on_what_has_state():
    assert cluster.run(frozen_and_trainable, workers=2) == [(1000, 990), (30, 15)]


# ---- Saving and loading


def saves_and_loads(bps: Any) -> None:
    model, reference = Model(), Model()
    make = {"lr": 0.01, "amsgrad": True}
    sharded = ShardedOptimizer(model.parameters(), torch.optim.Adam, **make)
    plain = torch.optim.Adam(reference.parameters(), **make)
    assert_same(sharded.state_dict(), plain.state_dict())  # before any step
    train(model, sharded, range(3))
    train(reference, plain, range(3))
    sharded.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.02

    whole = copy.deepcopy(sharded.state_dict())
    on_last = sharded.state_dict(root=bps.size() - 1)
    if bps.rank() == bps.size() - 1:
        assert_same(on_last, whole)
    else:
        assert on_last == {}

    # from sharded to plain, and from plain to sharded
    into_plain = Model()
    into_plain.load_state_dict(model.state_dict())
    plain_again = torch.optim.Adam(into_plain.parameters(), lr=1.0)
    plain_again.load_state_dict(copy.deepcopy(whole))
    into_sharded = Model()
    into_sharded.load_state_dict(reference.state_dict())
    sharded_again = ShardedOptimizer(into_sharded.parameters(), torch.optim.Adam, lr=1.0)
    sharded_again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert sharded_again.param_groups[0]["lr"] == 0.02
    assert bytes_of_state(sharded_again) == bytes_of_state(sharded)
    for each, optimizer in (
        (model, sharded), (reference, plain), (into_plain, plain_again), (into_sharded, sharded_again),
    ):  # fmt: skip
        train(each, optimizer, range(3, 6))
    for each, optimizer in ((reference, plain), (into_plain, plain_again), (into_sharded, sharded_again)):
        assert_same_models(each, model)
        state = optimizer.state_dict()
        assert_same(state, sharded.state_dict())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_states_move_between_sharded_and_plain(workers):
    cluster.run(saves_and_loads, workers=workers)


def collects_in_windows(bps: Any) -> None:
    from bps_rdma.torch import broadcast_objects

    broadcast_objects._WINDOW_BYTES = 100_000  # less than a tensor, and room for several of the small ones
    held: list[int] = []
    move = broadcast_objects.broadcast_tensors

    def watched(transfers: Any, group: Any, *, staged: bool = True) -> None:
        if bps.rank() != 1:
            own = {value.data_ptr() for state in sharded.state.values() for value in state.values()}
            held.append(sum(t.tensor.nbytes for t in transfers if t.tensor.data_ptr() not in own))
        move(transfers, group, staged=staged)

    broadcast_objects.broadcast_tensors = watched
    model = Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.Adam)
    train(model, sharded, range(1))
    whole = copy.deepcopy(sharded.state_dict())
    held.clear()
    part = sharded.state_dict(root=1)
    if bps.rank() == 1:
        assert_same(part, whole)
    else:
        assert part == {}
        assert len(held) > 2
        assert max(held) <= max(100_000, *(param.nbytes for param in model.parameters()))


def test_ranks_that_do_not_want_the_state_hold_a_window_of_it():
    cluster.run(collects_in_windows, workers=3)


def trains_from(bps: Any, state: Any, weights: Any, steps: range) -> Any:
    reference, model = Model(), Model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train(reference, plain, range(steps.stop))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    if state is not None:
        model.load_state_dict(weights)
        sharded.load_state_dict(state)
    train(model, sharded, steps)
    assert_same_models(model, reference)
    assert_same(sharded.state_dict(), plain.state_dict())
    return sharded.state_dict(), model.state_dict()


def test_a_state_of_three_ranks_goes_on_with_two():
    state, weights = cluster.run(trains_from, None, None, range(2), workers=3)[0]
    cluster.run(trains_from, state, weights, range(2, 4), workers=2)


def loads_nonsense(bps: Any) -> str:
    model = Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        sharded.load_state_dict(other.state_dict())
    train(model, sharded, range(1))
    with pytest.raises(bps.InvalidArgumentError, match="root 9"):
        sharded.state_dict(root=9)
    with pytest.raises(bps.MismatchError, match="root 1"):
        sharded.state_dict(root=bps.rank())
    with pytest.raises(bps.InvalidArgumentError, match="load_state_dict"):
        bps_torch.broadcast_optimizer_state(sharded)
    return "told"


def test_states_and_roots_that_do_not_fit():
    assert cluster.run(loads_nonsense, workers=2) == ["told"] * 2


# ---- Wrong input


def refuses(bps: Any, how: str) -> str:
    model = Model()
    odd = bps.rank() == 1
    params: Any = list(model.parameters())
    cls: Any = torch.optim.SGD
    options: dict[str, Any] = {"lr": 0.1}
    if how == "lbfgs":
        cls = torch.optim.LBFGS
    elif how == "no class":
        cls = torch.optim.SGD(params, lr=0.1)
    elif how == "twice":  # in two groups; in one, torch only warns
        params = [{"params": params}, {"params": params[:1]}]
    elif how == "empty":
        params = []
    elif how == "bad option":
        options["lr"] = -1.0 if odd else 0.1
    elif how == "fewer" and odd:
        params.pop()
    elif how == "shape" and odd:
        params[2] = torch.nn.Parameter(torch.zeros(30, 901))
    elif how == "class" and odd:
        cls = torch.optim.RMSprop
    elif how == "lbfgs on one" and odd:
        cls = torch.optim.LBFGS
    begin = time.monotonic()
    with pytest.raises((bps.BpsError, ValueError)) as raised:
        ShardedOptimizer(params, cls, **options)
    assert time.monotonic() - begin < SOON_S
    return f"{raised.type.__name__} {raised.value}"


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("lbfgs", "InvalidArgumentError LBFGS", None),
        ("no class", "InvalidArgumentError SGD", None),
        ("twice", "ValueError some parameters appear in more than one", None),
        ("empty", "ValueError optimizer got an empty parameter list", None),
        ("bad option", "InvalidArgumentError ShardedOptimizer: worker 1", "ValueError Invalid learning rate"),
        ("fewer", "MismatchError ShardedOptimizer", None),
        ("shape", "MismatchError ShardedOptimizer", None),
        ("class", "MismatchError ShardedOptimizer", None),
        ("lbfgs on one", "InvalidArgumentError ShardedOptimizer: worker 1", "InvalidArgumentError LBFGS"),
    ],
)
def test_what_cannot_be_sharded_is_told_everywhere(how, first, second):
    texts = cluster.run(refuses, how, workers=2)
    for text, wanted in zip(texts, (first, second or first), strict=True):
        assert text.startswith(wanted), text


def other_groups(bps: Any) -> str:
    model, reference = Model(), Model()
    sharded = ShardedOptimizer(model.first.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.first.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(bps.MismatchError) as raised:
        sharded.add_param_group({"params": model.third.weight if bps.rank() else model.second.weight})
    with pytest.raises((ValueError, bps.InvalidArgumentError)):
        sharded.add_param_group({"params": model.first.weight if bps.rank() else model.second.weight})
    for optimizer, each in ((sharded, model), (plain, reference)):  # nothing of that is left
        train(each, optimizer, range(2))
        optimizer.add_param_group({"params": each.second.weight})
        train(each, optimizer, range(2, 4))
    assert_same_models(model, reference)
    assert_same(sharded.state_dict(), plain.state_dict())
    return str(raised.value)


def test_groups_that_differ_are_told_everywhere():
    for text in cluster.run(other_groups, workers=2):
        assert "group 1 parameter 0" in text


# ---- Over torch.distributed, in groups, and when a rank is lost


def over_gloo(bps: Any) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    assert not bps.is_initialized()
    model, reference = Model(), Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    train(model, sharded, range(2))
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1), range(2))
    assert_same_models(model, reference)
    group = dist.new_group([0, 2])
    if bps.rank() in (0, 2):
        sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, group=group, lr=0.01)
        train(model, sharded, range(1))
        assert len(sharded.state_dict()["state"]) == 6
    size = bps.size()
    dist.destroy_process_group()
    bps.shutdown()
    return size


def test_it_starts_by_itself_over_a_gloo_group():
    assert cluster.run(over_gloo, workers=3, init=False) == [3, 3, 3]


def dies_while_stepping(bps: Any) -> tuple[str, float]:
    model = Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.Adam)
    train(model, sharded, range(2))
    backward(model, 0)
    mark("ready")
    if bps.rank() == 1:
        await_mark("never", timeout=60)
    with pytest.raises(bps.BpsError) as raised:
        sharded.step()
    came = time.monotonic()
    bps.shutdown()
    return f"{raised.type.__name__} {raised.value}", came


def test_a_rank_that_dies_during_a_step_is_named_soon():
    with cluster.start(dies_while_stepping, workers=3, env=FAST) as job:
        job.await_marks("ready")
        killed = job.kill("rank 1")
        outcomes = job.outcomes(but=[1])
    for rank in (0, 2):
        assert outcomes[rank].value is not None, outcomes[rank].error
        text, came = outcomes[rank].value
        assert text.startswith("PeerLostError"), text
        assert "worker 1" in text
        assert came - killed < SOON_S


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def tied_in_one_group(bps: Any) -> None:
    reference, params = ([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))] for _ in range(2))
    plain = torch.optim.Adam([*reference, reference[1]], lr=0.1)
    sharded = ShardedOptimizer([*params, params[1]], torch.optim.Adam, lr=0.1)
    for param in (*reference, *params):
        param.grad = torch.ones_like(param)
    plain.step()
    sharded.step()
    assert_same(params, reference)


def test_a_parameter_given_twice_in_one_group_is_as_torch_has_it():
    cluster.run(tied_in_one_group, workers=2)

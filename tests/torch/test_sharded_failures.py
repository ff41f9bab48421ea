# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer: wrong input is told on every rank, and a lost rank is named."""

import time
from typing import Any

import harness
import pytest
import torch
from bodies.losses import SOON_S, check_the_others_are_told, without_rank_1
from sharded_model import Model, assert_same, assert_same_models, backward, train

from bps_rdma.torch import ShardedOptimizer

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
    texts = harness.run(refuses, how, workers=2)
    for text, wanted in zip(texts, (first, second or first), strict=True):
        assert text.startswith(wanted), text


@harness.on_ranks(workers=2)
def test_groups_that_differ_are_told_everywhere(bps: Any) -> None:
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
    assert "group 1 parameter 0" in str(raised.value)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@harness.on_ranks(workers=2)
def test_gradients_that_nobody_has_averaged_are_refused_before_any_weight_changes(bps: Any, kind: str) -> None:
    table = torch.nn.Embedding(8, 2, sparse=kind == "sparse")
    torch.nn.init.ones_(table.weight)
    sharded = ShardedOptimizer(table.parameters(), torch.optim.SGD, lr=0.1)
    for average in (False, True):
        sharded.zero_grad()
        (table(torch.tensor([bps.rank(), 7])) * (1 + bps.rank() * (not average))).sum().backward()
        if average:
            sharded.step()
            break
        with pytest.raises(bps.MismatchError, match=r"parameter 0 .*wrap the model in DistributedDataParallel"):
            sharded.step()
        assert torch.equal(table.weight, torch.ones(8, 2))
    bps.barrier()


@harness.on_ranks(workers=2)
def test_other_parameters_in_its_groups_are_refused(bps: Any) -> None:
    """A script has moved, replaced or removed them by itself; the owners would go on with those that there were."""
    for change in ("moved", "replaced", "removed"):
        model = Model()
        first, *others = model.parameters()
        optimizer = ShardedOptimizer([{"params": [first], "lr": 0.1}, {"params": others}], torch.optim.SGD, lr=0.01)
        train(model, optimizer, range(1))
        if change == "moved":
            optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        elif change == "replaced":
            optimizer.param_groups[1]["params"][0] = torch.nn.Parameter(torch.zeros_like(others[0]))
        else:
            del optimizer.param_groups[1]
        for call in (optimizer.step, optimizer.state_dict):
            with pytest.raises(bps.BpsError, match="param_groups has other parameters"):
                call()


# ---- Over torch.distributed, in groups, and when a rank is lost


@harness.on_ranks(workers=3, init=False)
def test_it_starts_by_itself_over_a_gloo_group(bps: Any) -> None:
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
    assert bps.size() == 3


def dies_while_stepping(bps: Any) -> tuple[str, float]:
    model = Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.Adam)
    train(model, sharded, range(2))
    backward(model, 0)
    return without_rank_1(bps, sharded.step)


def test_a_rank_that_dies_during_a_step_is_named_soon():
    check_the_others_are_told(dies_while_stepping)


@harness.on_ranks(workers=2)
def test_a_parameter_given_twice_in_one_group_is_as_torch_has_it(bps: Any) -> None:
    reference, params = ([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))] for _ in range(2))
    plain = torch.optim.Adam([*reference, reference[1]], lr=0.1)
    sharded = ShardedOptimizer([*params, params[1]], torch.optim.Adam, lr=0.1)
    for param in (*reference, *params):
        param.grad = torch.ones_like(param)
    plain.step()
    sharded.step()
    assert_same(params, reference)

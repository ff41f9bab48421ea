# SPDX-License-Identifier: Apache-2.0
"""Wrappers of groups that share a rank: that rank makes more of them than the others, which must not wait in vain."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
import training
from bodies.views import FAST
from strategies import STRATEGIES
from torch import nn

import bps_rdma
import bps_rdma.torch as bps_torch
from bps_rdma import Group, RoundAbortedError
from bps_rdma.torch import CrossBarrier, DiLoCo, DistributedDataParallel, DistributedOptimizer, ShardedOptimizer

Wrap = Callable[[nn.Module, Group], tuple[nn.Module, Any]]
PAIRS = [0, 1], [0, 2]
COMPRESSED = bps_rdma.Int8(feedback=True, everywhere=True)
STEPS = 4


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(**options: Any) -> Wrap:
    def wrap(model: nn.Module, group: Group) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(model, group=group, bucket_mb=0.001, **options)
        return wrapped, sgd(wrapped)

    return wrap


def copied(model: nn.Module, group: Group) -> tuple[nn.Module, Any]:
    wrapped = copy.deepcopy(DistributedDataParallel(model, group=group))
    return wrapped, sgd(wrapped)


def optimizer(model: nn.Module, group: Group) -> tuple[nn.Module, Any]:
    return model, DistributedOptimizer(sgd(model), model.named_parameters(), group=group)


def late(model: nn.Module, group: Group) -> tuple[nn.Module, Any]:
    return model, CrossBarrier(model, sgd(model), group=group)


def sharded(model: nn.Module, group: Group) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(model, group=group)
    return wrapped, ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, group=group, lr=0.1, momentum=0.9)


def now_and_then(model: nn.Module, group: Group) -> tuple[nn.Module, Any]:
    return model, DiLoCo(sgd(model), every=2, group=group)


SYNCHRONOUS: dict[str, Wrap] = {
    **{strategy: ddp(strategy=strategy) for strategy in STRATEGIES},
    "compressed": ddp(compression=COMPRESSED), "copied": copied, "optimizer": optimizer, "late": late,
    "sharded": sharded, "now and then": now_and_then,
}  # fmt: skip


def groups_of(bps: Any) -> list[tuple[int, Group]]:
    return [(number, bps.new_group(ranks)) for number, ranks in enumerate(PAIRS) if bps.rank() in ranks]


def trained(wrap: Wrap, groups: list[tuple[int, Group]], steps: int = STEPS) -> dict[int, list[float]]:
    """Trains a model of its own in each group, in turns; their weights in the end, by the number of the group."""
    made = [(number, group, *wrap(training.seeded(training.Plain, number), group)) for number, group in groups]
    for step in range(steps):
        for _, _, _, each in made:
            each.zero_grad()
        for number, group, model, _ in made:
            training.loss_of(model(training.batch(10 * number + step, *training.share(group.rank, 2)))).backward()
        for _, _, _, each in made:
            each.step()
    for _, _, _, each in made:
        if hasattr(each, "synchronize"):
            each.synchronize()
    return {
        number: torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
        for number, _, model, _ in made
    }


def alone(number: int) -> torch.Tensor:
    model = training.seeded(training.Plain, number)
    one = sgd(model)
    for step in range(STEPS):
        training.make_step(model, one, training.batch(10 * number + step))
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def synchronous(bps: Any) -> dict[str, dict[int, list[float]]]:
    groups = groups_of(bps)
    return {name: trained(wrap, groups) for name, wrap in SYNCHRONOUS.items()}


def test_each_group_gets_means_of_its_own():
    env = {"BPS_MIN_COMPRESS_BYTES": "0"}
    found = harness.run(synchronous, workers=3, env=env)
    for name in SYNCHRONOUS:
        for number, (first, second) in enumerate(PAIRS):
            assert found[first][name][number] == found[second][name][number], name
            if name not in ("compressed", "now and then"):
                torch.testing.assert_close(
                    torch.tensor(found[first][name][number]), alone(number), rtol=1e-4, atol=1e-5, msg=name
                )


def asynchronous(bps: Any) -> dict[int, list[float]]:
    return trained(optimizer, groups_of(bps))


def test_servers_keep_weights_of_each_group():
    found = harness.run(asynchronous, workers=3, env={"BPS_ASYNC": "1", "BPS_STALENESS": "0"})
    for number, (first, second) in enumerate(PAIRS):
        assert found[first][number] == found[second][number]
    assert found[0][0] != found[0][1]


def hooked(bps: Any) -> list[list[float]]:
    """torch's DistributedDataParallel with a hook of ours: one state in each group."""
    dist.init_process_group("gloo")
    bps_torch.init()
    pairs = [dist.new_group(ranks) for ranks in PAIRS]
    found = []
    for ranks, pair in zip(PAIRS, pairs, strict=True):
        if dist.get_rank() in ranks:
            model = nn.Linear(1, 2, bias=False)
            each = nn.parallel.DistributedDataParallel(model, process_group=pair)
            each.register_comm_hook(bps_torch.HookState(pair), bps_torch.ddp_comm_hook)
            for value in (dist.get_rank(), 2.0 * dist.get_rank()):
                each.zero_grad()
                each(torch.full((1, 1), float(value))).sum().backward()
            found.append(model.weight.grad.flatten().tolist())
    return found


def test_each_group_has_hook_states_of_its_own():
    assert harness.run(hooked, workers=3, init=False) == [[[1.0] * 2, [2.0] * 2], [[1.0] * 2], [[2.0] * 2]]


def after_a_loss(bps: Any) -> list[float]:
    """Rank 3 is lost: the groups get other numbers, and the wrappers that they have go on beside new ones."""
    groups = groups_of(bps)
    trained(ddp(), groups, 1)
    harness.mark("ready")
    while bps.size() == 4:
        with contextlib.suppress(RoundAbortedError):
            bps.barrier()
    while True:
        with contextlib.suppress(RoundAbortedError):
            return list(trained(ddp(), groups).values())[-1]


def test_names_go_with_their_groups_into_the_next_view():
    found = harness.run(after_a_loss, workers=4, env=FAST | {"BPS_MIN_WORKERS": "2"}, kills="rank 3", at="ready")
    assert found[0] == found[2]
    for number, rank in enumerate((1, 2)):
        torch.testing.assert_close(torch.tensor(found[rank]), alone(number), rtol=1e-4, atol=1e-5)

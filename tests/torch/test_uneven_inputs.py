# SPDX-License-Identifier: Apache-2.0
"""join() of DistributedDataParallel and DistributedOptimizer: ranks with fewer batches do not stop the others."""

import functools
from datetime import timedelta
from typing import Any

import habits
import harness
import pytest
import torch
import torch.distributed as dist
import training
from torch import nn

import bps_rdma.torch as bps_torch
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer, ShardedOptimizer


def batches(rank: int, size: int, number: int) -> list[torch.Tensor]:
    """Rank 0 has none, the next one `number`, and so on."""
    return [training.batch(step, *training.share(rank, size)) for step in range(number * rank)]


def train(kind: str, divides: bool, make: Any) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = training.seeded(make, rank)
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=habits.plain_momentum(plain))
    if kind == "gloo":
        model: Any = nn.parallel.DistributedDataParallel(plain)
        join = model.join
    elif kind == "DDP":
        model = bps_torch.DistributedDataParallel(plain)
        join = model.join
    else:
        model = plain
        bps_torch.broadcast_parameters(plain.state_dict())
        names = [f"{name}.weight" for name, each in plain.named_modules() if isinstance(each, nn.Embedding)]
        optimizer = bps_torch.DistributedOptimizer(optimizer, plain.named_parameters(), sparse=names)
        join = optimizer.join
    with join(divide_by_initial_world_size=divides):
        for x in batches(rank, size, 2):
            training.make_step(model, optimizer, x)
    if kind == "optimizer":
        momentum = [
            float(each["momentum_buffer"].abs().sum())
            for each in optimizer.state.values()
            if each.get("momentum_buffer") is not None
        ]
        assert len(set(bps_torch.all_gather(torch.tensor([sum(momentum)])).tolist())) == 1
    found = [each.detach().clone() for each in plain.parameters()]
    if kind != "optimizer":
        found += [each.clone() for each in plain.buffers()]
    return found


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
@harness.on_ranks("workers", init=False)
def test_weights_are_those_of_torchs_join(bps: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    bps_torch.init()
    cases = [("DDP", make) for make in (training.Plain, training.Images, habits.Waves, habits.Words)]
    cases += [("optimizer", make) for make in (training.Plain, habits.Waves, habits.Words)]
    for kind, make in cases:
        for divides in (True, False):
            # In join() torch's DDP fails at sparse gradients.
            alike = make if make is not habits.Words else functools.partial(habits.Words, sparse=False)
            expected, found = train("gloo", divides, alike), train(kind, divides, make)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, msg=f"{kind}, {make.__name__}, {divides}: {one} {other}")


def backwards(model: nn.Module, join: Any, inputs: list[torch.Tensor]) -> None:
    with join:
        for x in inputs:
            training.loss_of(model(x)).backward()


@harness.on_ranks(workers=2)
def test_what_join_cannot_do_is_refused(bps: Any) -> None:
    errors = []
    model = DistributedDataParallel(training.seeded(training.Plain))
    with pytest.raises(bps.BpsError) as caught:
        backwards(model, model.join(throw_on_early_termination=True), batches(bps.rank(), bps.size(), 1))
    errors.append(caught.value.message)

    again = DistributedDataParallel(training.seeded(training.Plain))
    again(training.batch(0)).sum().backward()  # outside: gradients may be added up
    again(training.batch(1)).sum().backward()
    with pytest.raises(bps.BpsError) as caught:
        backwards(again, again.join(), 2 * batches(1, bps.size(), 1))
    errors.append(caught.value.message)

    plain = training.seeded(training.Plain)
    optimizer = DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), plain.named_parameters())
    with pytest.raises(bps.BpsError) as caught:
        backwards(plain, optimizer.join(), 2 * batches(1, bps.size(), 1))
    errors.append(caught.value.message)

    model = DistributedDataParallel(training.seeded(training.Plain))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(bps.BpsError) as caught, model.join():
        sharded.step()
    errors.append(caught.value.message)

    for other, wrap in ((model, model), (plain, optimizer)):  # as the other half of a GAN
        ddp = DistributedDataParallel(training.seeded(training.Plain))
        with pytest.raises(bps.BpsError) as caught, ddp.join(), wrap.join():
            pass
        errors.append(caught.value.message)
        with pytest.raises(bps.BpsError) as caught:
            backwards(other, ddp.join(), batches(1, bps.size(), 1))
        errors.append(caught.value.message)
    buffered = DistributedDataParallel(nn.BatchNorm1d(8))
    with pytest.raises(bps.BpsError) as caught, model.join():
        buffered(training.batch(0))
    errors.append(caught.value.message)
    (first, second, third, fourth, *of_two) = errors
    assert first.startswith("worker 0 has no inputs any more, and worker 1 has")
    assert "still is the mean of an earlier pass" in second
    assert "got a gradient again before step()" in third
    assert "step() of a ShardedOptimizer" in fourth
    assert len(of_two) == 5
    assert all(each.startswith("join() of one wrapper is running") for each in of_two)


@harness.on_ranks(workers=1)
def test_a_rank_alone_may_do_so(bps: Any) -> None:
    """What trains on one rank need not be written anew: nobody else can run out of inputs."""
    model, other = (DistributedDataParallel(training.seeded(training.Plain)) for _ in range(2))
    optimizer = DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other.module.named_parameters())
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    expected = training.seeded(training.Plain)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    with model.join(), optimizer.join():
        for x in batches(bps.rank(), bps.size(), 2):
            (model(x).sum() + other.module(x).sum()).backward()
            expected(x).sum().backward()
            for each in (sharded, optimizer, plain):
                each.step()
                each.zero_grad()
    for one, two, right in zip(*(each.parameters() for each in (model, other, expected)), strict=True):
        assert torch.equal(one, right)
        assert torch.equal(two, right)


@harness.on_ranks(workers=2)
def test_a_module_that_is_replaced_before_join(bps: Any) -> None:
    """A rank without inputs, which runs no forward, trains the new one, too."""
    model = DistributedDataParallel(training.seeded(training.Plain))
    model.module = nn.Linear(8, 4)
    bps_torch.broadcast_parameters(model.module.state_dict())
    before = model.module.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for x in batches(bps.rank(), bps.size(), 1):
            model(x).sum().backward()
            optimizer.step()
    assert not torch.equal(model.module.weight, before)

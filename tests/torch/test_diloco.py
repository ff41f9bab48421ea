# SPDX-License-Identifier: Apache-2.0
"""DiLoCo and LocalSGD against the same thing computed by one process for all ranks."""

import contextlib
import copy
from typing import Any

import harness
import pytest
import torch
import training
from harness import await_mark, mark
from restarted import ends_of
from torch import nn

from bps_rdma.torch import Compression, DiLoCo, Int4, Int8, LocalSGD, RoundAbortedError, Uncompressed

STEPS, EVERY = 24, 4
TCP = {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "0"}


def model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return (net(x) - x[:, :4].sin()).square().mean()


def trained(bps: Any, options: dict[str, Any], steps: int = STEPS) -> list[torch.Tensor]:
    net = model(seed=1 + bps.rank())  # rank 0's counts
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.1), every=EVERY, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, step, bps.rank()).backward()
        optimizer.step()
    optimizer.synchronize()
    return [one.detach() for one in net.parameters()]


def expected(world: int, lr: float, momentum: float) -> list[torch.Tensor]:
    """DiLoCo of all ranks in one process, parameter by parameter."""
    nets = [model() for _ in range(world)]
    inner = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    anchor = model()
    outer = torch.optim.SGD(anchor.parameters(), lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            optimizer.zero_grad()
            loss(net, step, rank).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            for number, one in enumerate(anchor.parameters()):
                one.grad = torch.stack([one.detach() - list(net.parameters())[number] for net in nets]).mean(0).detach()
            outer.step()
            for net in nets:
                net.load_state_dict(anchor.state_dict())
    return [one.detach() for one in anchor.parameters()]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_it_is_the_outer_optimizer_of_torch_on_the_mean(momentum: float) -> None:
    results = harness.run(trained, {"outer_momentum": momentum}, workers=3)
    for rank in results:
        torch.testing.assert_close(rank, expected(3, 0.7, momentum), rtol=1e-4, atol=1e-5)
        for one, first in zip(rank, results[0], strict=True):
            assert torch.equal(one, first)


@harness.on_ranks(workers=2)
def test_local_sgd_averages_every_few_steps(bps: Any) -> None:
    net = model()
    optimizer = LocalSGD(torch.optim.Adam(net.parameters(), 0.01), net.named_parameters(), every=3)
    for step in range(6):
        optimizer.zero_grad()
        loss(net, step, bps.rank()).backward()
        before = bps.metrics()["total"]["operations"]
        optimizer.step()
        sent = bps.metrics()["total"]["operations"] - before
        assert sent == (1 if step in (0, 2, 5) else 0), "they are compared once, and agree twice"
        flat = torch.cat([one.detach().flatten() for one in net.parameters()])
        everybody = bps.all_gather(flat).view(bps.size(), -1)
        assert bool((everybody == everybody[0]).all()) == (step in (2, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 3},
        {"fragments": 2, "delay": 2, "mix": 0.5},
        {"compression": Int8(feedback=True)},
        {"compression": Int4(feedback=True), "fragments": 2, "delay": 1},
    ],
)
def test_ranks_learn_together(options: dict[str, Any]) -> None:
    results = harness.run(trained, options, 160, workers=2, env=TCP)
    losses = []
    for rank in results:
        net = model()
        for one, value in zip(net.parameters(), rank, strict=True):
            one.data.copy_(value)
        losses.append(sum(float(loss(net, step, 7).detach()) for step in range(1000, 1010)) / 10)
    untrained = sum(float(loss(model(), step, 7).detach()) for step in range(1000, 1010)) / 10
    assert max(losses) < untrained / 3, (losses, untrained)


@pytest.mark.parametrize("compression", [Uncompressed(), Int4(feedback=True)], ids=["none", "int4"])
@harness.on_ranks(**harness.on_hosts("ab"), env=TCP)
def test_a_checkpoint_goes_on(bps: Any, compression: Compression) -> None:
    def begin() -> tuple[nn.Module, DiLoCo]:
        net = model()
        return net, DiLoCo(
            torch.optim.SGD(net.parameters(), 0.1, momentum=0.5), every=4, fragments=2, compression=compression
        )

    def run(net: nn.Module, optimizer: DiLoCo, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss(net, step, bps.rank()).backward()
            optimizer.step()

    net, optimizer = begin()
    run(net, optimizer, range(10))
    saved = copy.deepcopy(optimizer.state_dict()), {key: value.clone() for key, value in net.state_dict().items()}
    run(net, optimizer, range(10, 20))
    again, other = begin()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    run(again, other, range(10, 20))
    for one, same in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    assert other.steps == 20
    with pytest.raises(bps.InvalidArgumentError, match="other parameters"):
        DiLoCo(torch.optim.SGD(model().parameters(), 0.1)).load_state_dict(saved[0])
    if compression == Uncompressed():
        return
    for one in saved[0]["fragments"]:
        assert any(value.any() for piece in one["compression"].values() for value in piece.values())
    plain = DiLoCo(torch.optim.SGD(model().parameters(), 0.1), fragments=2)
    with pytest.raises(bps.InvalidArgumentError, match="pieces, and there are 0"):
        plain.load_state_dict(saved[0])
    assert plain.steps == 0
    for one in saved[0]["fragments"]:
        del one["compression"]
    other.load_state_dict(saved[0])  # as an older version saved it
    assert not any(
        value.any()
        for one in other.state_dict()["fragments"]
        for piece in one["compression"].values()
        for key, value in piece.items()
        if key != "saved_by"
    )


@harness.on_ranks(workers=2)
def test_frozen_parameters_are_those_of_one_rank(bps: Any) -> None:
    net = model(seed=1 + bps.rank())
    net[0].requires_grad_(False)
    DiLoCo(torch.optim.SGD(net.parameters(), 0.1))
    assert training.distance(net, model()) == 0


@harness.on_ranks(workers=2)
def test_weights_of_a_checkpoint_that_are_overwritten_are_told(bps: Any) -> None:
    """Between two agreements each rank has weights of its own, and who makes a DiLoCo has those of rank 0."""
    net = model()
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), every=4)
    for step in range(8):
        if step == 6:
            weights, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            net = model()
            net.load_state_dict(weights)
            optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), every=4)
            optimizer.load_state_dict(state)
            told = "" if bps.rank() == 1 else "worker 1 cannot take part: "
            for _ in range(2):
                with pytest.raises(bps.BpsError, match=rf"{told}'0\.weight' has other .*state_dict\(\) before"):
                    optimizer.step()
            net.load_state_dict(weights)
        optimizer.zero_grad()
        loss(net, step, bps.rank()).backward()
        optimizer.step()
    for mine, same in zip(net.parameters(), trained(bps, {}, 8), strict=True):
        assert torch.equal(mine, same)


@harness.on_ranks(workers=2)
def test_states_of_different_steps_are_told(bps: Any) -> None:
    net = model()
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.1), every=2)
    loss(net, 0, bps.rank()).backward()
    optimizer.step()
    weights, new = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    loss(net, 1, bps.rank()).backward()
    optimizer.step()
    net.load_state_dict(weights)
    optimizer.load_state_dict(new | {"steps": 1 + bps.rank()})
    with pytest.raises(bps.MismatchError, match="worker 0 has made 1 steps where worker 1 has made 2 steps"):
        optimizer.step()


@harness.on_ranks(workers=2)
def test_ranks_that_agree_at_other_times_are_told(bps: Any) -> None:
    for name, options in (("every", {"every": 2 + bps.rank()}), ("outer_lr", {"outer_lr": 0.5 + bps.rank()})):
        with pytest.raises(bps.MismatchError, match=f"{name} .* where worker 1 has {name}"):
            DiLoCo(torch.optim.SGD(model().parameters(), 0.1), **options)


@harness.on_ranks(workers=1)
def test_what_makes_no_sense_is_refused(bps: Any) -> None:
    for wrong in ({"every": 0}, {"every": 4, "delay": 4}, {"mix": 2}, {"fragments": 7}, {"compression": "zip"}):
        with pytest.raises(bps.InvalidArgumentError):
            DiLoCo(torch.optim.SGD(model().parameters(), 0.1), **({"every": 1} | wrong)).step()


@harness.on_ranks(workers=2)
def test_weights_that_are_loaded_too_late_are_told(bps: Any) -> None:
    """Weights that are loaded after the optimizer was wrapped: a mean of plain weights takes them, and DiLoCo tells."""
    for make in (LocalSGD, DiLoCo):
        net, other = model(), model(2)
        optimizer = make(torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), every=2)
        net.load_state_dict(other.state_dict())
        for step in range(2):
            loss(net, step, bps.rank()).backward()
            if make is DiLoCo:
                with pytest.raises(bps.BpsError, match=r"'0\.weight' has other values than when the ranks agreed"):
                    optimizer.step()
            else:
                optimizer.step()
        for one, same in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, same)


def goes_on(bps: Any) -> tuple[int, list[torch.Tensor]]:
    net = model()
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.1), every=2)
    step = 0
    while step < 200:
        optimizer.zero_grad()
        loss(net, step, bps.rank()).backward()
        with contextlib.suppress(RoundAbortedError):  # the step itself has been made
            optimizer.step()
        step += 1
        if step == 20:
            mark("running")
        if step == 100:
            await_mark("killed")
    optimizer.synchronize()
    bps.barrier()
    return bps.size(), [one.detach() for one in net.parameters()]


def test_a_lost_rank() -> None:
    first, second = harness.run(goes_on, workers=3, servers=1, env={"BPS_MIN_WORKERS": "1"}, kills="rank 2")
    assert first[0] == second[0] == 2
    for one, other in zip(first[1], second[1], strict=True):
        assert torch.equal(one, other)


def in_group(bps: Any) -> list[torch.Tensor]:
    """Ranks 1 and 2 of 3 train; rank 1's parameters are those of both."""
    if bps.rank() == 0:
        return []
    group = bps.new_group([1, 2])
    net = model(seed=bps.rank())
    LocalSGD(torch.optim.SGD(net.parameters(), 0.1), every=1, group=group)
    for mine, first in zip(net.parameters(), model(seed=1).parameters(), strict=True):
        assert torch.equal(mine, first)
    optimizer = DiLoCo(torch.optim.SGD(net.parameters(), 0.1), every=EVERY, outer_lr=0.7, group=group)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, step, bps.rank() - 1).backward()
        optimizer.step()
    return [one.detach() for one in net.parameters()]


def test_a_group_without_rank_0():
    _, first, second = harness.run(in_group, workers=3)
    for mine, theirs, reference in zip(first, second, expected(2, 0.7, 0.9), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


MAKE = """
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = bps.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), every=3)
"""
LOSS = "model(torch.randn(16, 8, generator=generator)).square().mean()"
END = """
while optimizer.steps % 3:
    optimizer.step()
total = sum(p.double().sum().item() for p in model.parameters())
sys.stdout.write(f"end: {begun_at} {optimizer.steps} {sorted(set(state.seen))} {total.hex()}\\n")
"""


def test_a_rank_that_is_started_again_agrees_with_the_others(tmp_path):
    ends = ends_of(tmp_path, make=MAKE, loss=LOSS, end=END, steps=21)
    assert sorted(int(end[1]) for end in ends)[:2] == [0, 0]
    assert max(int(end[1]) for end in ends) > 5, "the new rank has gone on where the others were"
    assert len({tuple(end[2:]) for end in ends}) == 1, "all have made the same steps, and have the same parameters"

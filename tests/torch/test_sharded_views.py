# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer in a job whose members change: no step is used by half, and no state goes with one rank."""

import copy
import os
import signal
from functools import partial
from typing import Any

import harness
import pytest
import torch
from harness import await_mark, mark
from restarted import ends_of
from sharded_model import assert_same, bytes_of_state
from torch import nn

from bps_rdma import RoundAbortedError
from bps_rdma.torch import DistributedDataParallel, ShardedOptimizer, TrainingState

STEPS = 12
LOST_AT = 5
ENV = {"BPS_MIN_WORKERS": "2"}
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def model() -> nn.Module:
    """Parameters that are sent alone, and some that are sent together with others."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 900), nn.Tanh(), nn.Linear(900, 30), nn.Tanh(), nn.Linear(30, 2))


def loss(trained: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    result: torch.Tensor = trained(inputs).square().mean()
    return result


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies(sharded: Any, inner: Any, moment: str) -> None:
    """Arranges for this process to be killed in the step that follows."""
    send = sharded._shards.broadcast
    if moment == "in backward":
        inner[2].weight.register_hook(die)
    elif moment == "before it sends":
        sharded._shards.broadcast = die
    elif moment == "when all have been sent":
        sharded._shards.broadcast = lambda: die(send())


def train(bps: Any, moment: str, deaths: dict[int, int]) -> list[Any]:
    """Ranks are killed in the steps that `deaths` names, by what they were at the start."""
    inner = model()
    trained = DistributedDataParallel(inner)
    sharded = ShardedOptimizer(inner.parameters(), torch.optim.AdamW, **OPTIONS)
    state: Any = TrainingState(trained, sharded, step=0)
    first, taken, told = bps.rank(), [], 0
    while state.step < STEPS:
        try:
            state.sync()
            sharded.zero_grad()
            value = loss(trained, state.step, bps.rank())
            if deaths.get(first) == state.step:
                dies(sharded, inner, moment)
            value.backward()
            sharded.step()
        except RoundAbortedError:
            told += 1
            continue
        taken.append((state.step, bps.size()))
        state.step += 1
    return [taken, told, bytes_of_state(sharded), sharded.state_dict(), inner.state_dict()]


def expected(sizes: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same steps in one process: the mean of the gradients of as many ranks."""
    inner = model()
    optimizer = torch.optim.AdamW(inner.parameters(), **OPTIONS)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for rank in range(size):
            (loss(inner, step, rank) / size).backward()
        optimizer.step()
    return inner, optimizer


@pytest.mark.parametrize(
    "moment", ["in backward", pytest.param("before it sends", marks=pytest.mark.long), "when all have been sent"]
)
def test_what_a_lost_rank_kept_goes_on(moment):
    deaths = {2: LOST_AT, 1: LOST_AT + 3}
    results = harness.run(train, moment, deaths, workers=4, env=ENV, but=[1, 2])
    sizes = [4] * LOST_AT + [3] * 3 + [2] * (STEPS - LOST_AT - 3)
    inner, optimizer = expected(sizes)
    for taken, told, _, state, parameters in results:
        assert taken == list(enumerate(sizes))
        assert told == 2
        assert_same(state, results[0][3])
        assert_same(parameters, results[0][4])
        for mine, reference in zip(parameters.values(), inner.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, reference, rtol=2e-4, atol=1e-5)
        for place, theirs in optimizer.state_dict()["state"].items():
            assert state["state"][place]["step"] == STEPS
            torch.testing.assert_close(state["state"][place]["exp_avg_sq"], theirs["exp_avg_sq"], rtol=1e-3, atol=1e-7)


def test_a_first_step_that_fails_is_used_by_nobody():
    """Others have what its owners have sent already, and no step was made before."""
    results = harness.run(train, "when all have been sent", {2: 0}, workers=4, env=ENV, but=[2])
    inner, _ = expected([3] * STEPS)
    for taken, told, _, state, parameters in results:
        assert (taken, told) == ([(step, 3) for step in range(STEPS)], 1)
        for mine, reference in zip(parameters.values(), inner.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, reference, rtol=2e-4, atol=1e-5)
        assert {one["step"].item() for one in state["state"].values()} == {STEPS}


@harness.on_ranks(workers=4, env=ENV, rank_env=[{"BPS_HOST_ID": host} for host in "aabb"])
def test_the_copies_of_a_state_lie_on_two_hosts(bps: Any) -> None:
    """A host may be lost with all its ranks."""
    inner = model()
    sharded = ShardedOptimizer(inner.parameters(), torch.optim.AdamW, **OPTIONS)
    keepers = [sharded._shards.keepers(param) for param in inner.parameters()]
    assert all({rank // 2 for rank in pair} == {0, 1} for pair in keepers), keepers
    assert len({pair[0] for pair in keepers}) > 1


def divides(bps: Any) -> tuple[int, int, int]:
    sizes = []
    for copies in (1, 2, None):
        inner = model()
        sharded = ShardedOptimizer(inner.parameters(), torch.optim.AdamW, copies=copies, **OPTIONS)
        loss(inner, 0, 0).backward()
        sharded.step()
        sizes.append(bytes_of_state(sharded))
    return tuple(sizes)


def test_each_state_is_kept_twice():
    parts = harness.run(divides, workers=4, env=ENV)
    once, twice, default = (sum(sizes) for sizes in zip(*parts, strict=True))
    assert twice == default == 2 * once
    _, optimizer = expected([1])
    assert once == bytes_of_state(optimizer)


def loses_too_much(bps: Any) -> list[str]:
    inner = model()
    sharded = ShardedOptimizer(inner.parameters(), torch.optim.AdamW, copies=1, **OPTIONS)
    state: Any = TrainingState(inner, sharded)
    state.sync()
    sharded.zero_grad()
    loss(inner, 0, 0).backward()
    sharded.step()
    saved, weights = copy.deepcopy((sharded.state_dict(), inner.state_dict()))
    mark("saved")  # a rank that is lost earlier takes the state with it that others still wait for
    if bps.rank() == 1:
        await_mark("never")
    texts = []
    with pytest.raises(RoundAbortedError):
        sharded.step()
    bps.rank()  # in the next view
    more = {"params": [nn.Parameter(torch.zeros(3))]}
    for call in (sharded.step, sharded.state_dict, partial(sharded.add_param_group, more)):
        with pytest.raises(bps.BpsError) as without:
            call()
        texts.append(str(without.value))
    for call in (state.sync, sharded.step, sharded.state_dict):
        with pytest.raises(bps.PeerLostError) as raised:
            call()
        texts.append(str(raised.value))
    inner.load_state_dict(weights)
    sharded.load_state_dict(saved)
    state.sync()
    loss(inner, 1, 0).backward()
    sharded.step()
    plain = model()
    reference = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    for step in range(2):
        if step == 0:
            reference.zero_grad()
        loss(plain, step, 0).backward()
        reference.step()
    assert_same(dict(inner.state_dict()), dict(plain.state_dict()))
    return texts


def test_what_is_lost_is_told_until_a_checkpoint_is_loaded():
    results = harness.run(loses_too_much, workers=3, env=ENV, kills="rank 1", at="saved")
    for texts in results:
        without, lost = texts[:3], texts[3:]
        assert all("call TrainingState.sync()" in text for text in without), without
        assert "was on lost ranks only" in lost[0]
        assert "load_state_dict()" in lost[0]
        assert len(lost) == 3
        assert len(set(lost)) == 1


MAKE = """
inner = torch.nn.Sequential(torch.nn.Linear(20, 900), torch.nn.Tanh(), torch.nn.Linear(900, 30))
model = bps.DistributedDataParallel(inner)
optimizer = bps.ShardedOptimizer(inner.parameters(), torch.optim.AdamW, lr=0.01)
"""
END = """
total = sum(p.double().sum().item() for p in inner.parameters())
whole = optimizer.state_dict()["state"]
momenta = sum(one["exp_avg"].double().sum().item() for one in whole.values())
steps = {int(one["step"]) for one in whole.values()}
kept = sum(one["exp_avg"].numel() for one in optimizer.state.values())
sys.stdout.write(f"end: {state.step} {steps} {total.hex()} {momenta.hex()} {kept}\\n")
"""


@pytest.mark.long
def test_a_rank_that_enters_gets_its_part(tmp_path):
    ends = ends_of(tmp_path, make=MAKE, loss="model(torch.randn(16, 20, generator=generator)).square().mean()", end=END)
    assert len({tuple(end[1:5]) for end in ends}) == 1, "all have the same step, parameters and momenta, to the bit"
    step, steps = ends[0][1:3]
    assert steps == "{" + step + "}", "each state has seen every step once"
    whole = sum(p.numel() for p in nn.Sequential(nn.Linear(20, 900), nn.Linear(900, 30)).parameters())
    kept = [int(end[5]) for end in ends]
    assert sum(kept) == 2 * whole
    assert max(kept) < whole

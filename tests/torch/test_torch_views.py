# SPDX-License-Identifier: Apache-2.0
"""A rank dies in training, and the others go on: every step is used by all of them or by none."""

import contextlib
import os
import signal
from functools import partial
from typing import Any

import harness
import pytest
import simulated
import torch
from bodies.untold_views import go_on
from bodies.views import FAST
from harness import await_mark, eventually, mark
from torch import nn

import bps_rdma.torch as bps_torch
from bps_rdma import RoundAbortedError, presence
from bps_rdma.torch import DiLoCo, DistributedDataParallel, DistributedOptimizer, TrainingState
from bps_rdma.torch.cross_barrier import CrossBarrier

STEPS = 12
LOST_AT = 5


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 300), nn.Linear(300, 2))


def loss(trained: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 8, generator=generator)
    result: torch.Tensor = trained(inputs).square().mean()
    return result


def train(bps: Any, face: str, moment: str) -> list[Any]:
    """Rank 2 of 4 is killed in step LOST_AT; what the parameters are in the end, and who took each step."""
    inner = model()
    trained: Any = inner
    optimizer: Any = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    if face == "ddp":
        trained = DistributedDataParallel(inner, bucket_mb=0.02)
    else:
        bps.torch.broadcast_parameters(inner.state_dict(), 0)
        kind: Any = {"optimizer": DistributedOptimizer, "cross barrier": partial(CrossBarrier, inner)}[face]
        optimizer = kind(optimizer, inner.named_parameters())
    first, step, taken, told = bps.rank(), 0, [], 0
    while step < STEPS:
        try:
            optimizer.zero_grad()
            value = loss(trained, step, bps.rank())
            if (first, step) == (2, LOST_AT):
                if moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                inner[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            value.backward()
            if face != "ddp":
                optimizer.step()
        except RoundAbortedError:
            told += 1
            continue
        if face == "ddp":
            optimizer.step()
        taken.append((step, bps.size()))
        step += 1
    parameters = [p.detach().numpy().copy() for p in inner.parameters()]
    return [taken, told, parameters]


def expected() -> list[Any]:
    """The same steps in one process: the mean of the gradients of as many ranks."""
    inner = model()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        size = 4 if step < LOST_AT else 3
        optimizer.zero_grad()
        for rank in range(size):
            (loss(inner, step, rank) / size).backward()
        optimizer.step()
    return [p.detach().numpy() for p in inner.parameters()]


LOSSES = [("ddp", "in"), ("optimizer", "before"), ("cross barrier", "in")]
MORE_LOSSES = [("ddp", "before"), ("optimizer", "in"), ("cross barrier", "before")]


@pytest.mark.parametrize(
    ("face", "moment"), [*LOSSES, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE_LOSSES)]
)
def test_a_step_is_repeated_without_the_lost_rank(face, moment):
    ranks = harness.run(train, face, moment, workers=4, env={"BPS_MIN_WORKERS": "2"}, but=[2])
    for taken, told, parameters in ranks:
        assert taken == [(step, 4 if step < LOST_AT else 3) for step in range(STEPS)]
        assert told == 1
        for mine, reference, theirs in zip(parameters, expected(), ranks[0][2], strict=True):
            assert (mine == theirs).all(), "the ranks that are left have the same bits"
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(reference), rtol=2e-4, atol=1e-5)


@harness.on_ranks(workers=3, env=FAST | {"BPS_MIN_WORKERS": "2"}, but=[2])
def test_ranks_that_round_differently_go_on_without_a_lost_one(bps: Any) -> None:
    """Processors of several kinds: the weights of ranks differ in their last bits when one of them is lost."""
    inner = model()
    trained = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    first, step = bps.rank(), 0
    while step < 4:
        try:
            optimizer.zero_grad()
            if (first, step) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            loss(trained, step, bps.rank()).backward()
        except bps.RoundAbortedError:
            continue
        optimizer.step()
        with torch.no_grad():
            inner[0].weight.mul_(1 + 1e-7 * first)
        step += 1
    assert bps.size() == 2


def never_broadcast(bps: Any) -> str:
    """The ranks have made other models, and one is lost before they could find out."""
    torch.manual_seed(bps.rank())
    inner = nn.Linear(8, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(inner.parameters(), lr=0.05), inner.named_parameters())
    first = bps.rank()
    mark("made")
    if first == 2:
        await_mark("never")
    while True:
        try:
            optimizer.zero_grad()
            loss(inner, 0, first).backward()
            optimizer.step()
        except bps.RoundAbortedError:
            continue
        except bps.MismatchError as error:
            return str(error)


def test_models_that_differ_are_told_although_a_rank_was_lost():
    for text in harness.run(never_broadcast, workers=3, env=FAST | {"BPS_MIN_WORKERS": "2"}, kills="rank 2", at="made"):
        assert "weight" in text
        assert "call broadcast_parameters()" in text


def is_ended() -> bool:
    """Whether the view has ended, which nothing has told the caller yet."""
    job = presence.now().job
    return job is not None and job.process.view_ended


def wrapped(kind: str) -> Any:
    """A model, and a function that trains it one step, averaged by a wrapper of this kind."""
    inner = model()
    plain = torch.optim.SGD(inner.parameters(), lr=0.05)
    if kind == "optimizer":
        optimizer = bps_torch.DistributedOptimizer(plain, inner.named_parameters())
    elif kind == "DiLoCo":
        optimizer = bps_torch.DiLoCo(plain, inner.named_parameters(), every=1)
    else:
        inner, optimizer = bps_torch.DistributedDataParallel(inner), plain

    def train(seed: int) -> None:
        optimizer.zero_grad()
        loss(inner, 0, seed).backward()
        optimizer.step()

    return train


def made_again(bps: Any, kind: str) -> int:
    """A view ends while rank 1 makes a wrapper, and before rank 0 does. Returns how often this rank has tried."""
    first, train, tries = bps.rank(), None, 0
    mark("ready")
    if first == 2:
        await_mark("never")
    if first == 0:
        eventually(is_ended, what="the end of the view")
    while train is None:
        tries += 1
        with contextlib.suppress(bps.RoundAbortedError):
            train = wrapped(kind)
    while True:
        with contextlib.suppress(bps.RoundAbortedError):
            train(first)
            return tries


@pytest.mark.parametrize("kind", ["optimizer", "DDP", "DiLoCo"])
def test_ranks_give_one_name_to_a_wrapper_that_some_make_again(kind):
    env = FAST | {"BPS_MIN_WORKERS": "2", "BPS_TIMEOUT": str(20 * harness.PATIENCE)}
    values = harness.run(made_again, kind, workers=3, env=env, kills="rank 2", at="ready")
    assert max(values[:2]) > 1


def leaves_rests(bps: Any, face: str) -> list[int]:
    """Rank 0 has operations of view 1 to give up in view 2, and finds out by them that this has ended as well.

    Rank 3 is lost in view 1, and rank 2 in view 2. Rank 1 learns of both by calls of its own.
    """

    class Late(DiLoCo):
        def take_over(self) -> None:
            await_second_loss()
            super().take_over()

    def await_second_loss() -> None:
        if len(told) == 1:
            mark("second")
            eventually(is_ended)
            if first == 1:
                bps.barrier()

    def await_first_loss(_: torch.Tensor) -> None:
        if not told:
            eventually(is_ended)

    first = bps.rank()
    told: list[int] = []
    trained: Any = model()
    optimizer: Any = torch.optim.SGD(trained.parameters(), lr=0.05)
    if face == "ddp":
        trained = DistributedDataParallel(trained, bucket_mb=0.001)
    else:
        optimizer = Late(optimizer, every=2, delay=1)
    state = TrainingState(trained, optimizer, step=0)
    while state.step < 8:
        try:
            state.sync()
            if face == "ddp":
                await_second_loss()
            optimizer.zero_grad()
            value = loss(trained, state.step, first)
            if state.step == 3 and not told:
                mark("first")
                if face == "ddp" and first == 0:  # some buckets are on their way then
                    next(trained.parameters()).register_hook(await_first_loss)
                elif face == "ddp" or first == 3:  # without rank 3 no mean arrives
                    eventually(is_ended)
            value.backward()
            optimizer.step()
            bps.barrier()
            state.step += 1
        except bps.RoundAbortedError:
            told.append(bps.size())
    return told


@pytest.mark.parametrize("face", ["ddp", "diloco"])
def test_a_view_that_ends_while_rests_are_given_up_is_told(face):
    with harness.start(leaves_rests, face, workers=4, env={"BPS_MIN_WORKERS": "2"}) as job:
        for rank, moment in ((3, "first"), (2, "second")):
            job.await_marks(moment, [0, 1, 2])
            job.kill(f"rank {rank}")
        assert job.values(but=[2, 3])[:2] == [[3, 2], [3, 2]]


def skips_a_batch(bps: Any) -> list[float]:
    """Backward fails on rank 1 before its first gradient, and the view ends in which the others wait for that pass."""

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    def fails(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if first == 1:
            output.register_hook(fail)
        return output * 1

    inner, first = model(), bps.rank()
    trained = DistributedDataParallel(inner)
    for step in range(2):  # in the second one ranks agree on the order of buckets
        loss(trained, step, first).backward()
    hook = inner[4].register_forward_hook(fails)
    output = loss(trained, 1, first)
    hook.remove()
    if first == 2:
        await_mark("never")
    elif first == 1:
        with pytest.raises(ZeroDivisionError):
            output.backward()
        mark("failed")
        eventually(is_ended, what="the end of the view")
        with pytest.raises(bps.RoundAbortedError):
            bps.barrier()
    else:
        with pytest.raises(bps.RoundAbortedError):
            output.backward()
    trained.zero_grad()
    loss(trained, 1, first).backward()
    return [float(parameter.grad.double().sum()) for parameter in inner.parameters() if parameter.grad is not None]


def test_the_end_of_a_view_ends_a_pass_that_has_failed():
    env = FAST | {"BPS_MIN_WORKERS": "2", "BPS_TIMEOUT": str(20 * harness.PATIENCE)}
    with harness.start(skips_a_batch, workers=3, env=env) as job:
        job.await_marks("failed", [1])
        job.kill("rank 2")
        first, second = job.values(but=[2])[:2]
    assert first == second != []


WITHOUT_STATE = """
import os, signal, sys
import torch
import bps_rdma.torch as bps
bps.init()
torch.manual_seed(1 + bps.rank())
model = bps.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
died, met = os.path.exists(sys.argv[1]), False
while not met:
    try:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if bps.rank() == 1 and not died:
            open(sys.argv[1], "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        steps = bps.size() == 3 and os.path.exists(sys.argv[1])
        met = bps.push_pull(torch.tensor(float(steps)), name="met", op="min").item() == 1
    except bps.RoundAbortedError:
        died = True
"""


def test_a_rank_that_enters_without_the_state_is_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_STATE)
    command = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", "--restarts", "1", str(script)]
    ended = harness.run_command([*command, str(tmp_path / "died")], env=harness.clean_env(), within=200)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "call sync() of a TrainingState" in ended.stderr, ended.stderr


def staged(bps: Any) -> Any:
    """The threads that move a tensor to a device and back are told of a loss before the caller is."""
    simulated.install(immediate=True)
    handle = bps.torch.push_pull_async(torch.ones(5), name="alone")
    mark("running")
    eventually(handle.done)
    return handle


@pytest.mark.parametrize("servers", [None, 1])
def test_a_thread_of_the_library_tells_nobody_of_a_loss(servers):
    with harness.start(go_on, staged, workers=3, servers=servers, env=FAST | {"BPS_MIN_WORKERS": "2"}) as job:
        job.await_marks("running", [0, 2])
        job.kill("rank 1")
        job.values(but=[1])

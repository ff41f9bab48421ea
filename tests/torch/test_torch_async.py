# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with BPS_ASYNC=1."""

import os
import signal
from typing import Any

import harness
import pytest
import torch
from bodies.untold_views import has_ended
from bodies.views import FAST
from harness import await_mark, eventually, mark
from restarted import ends_of
from torch import nn

from bps_rdma.errors import DeadlineError, InvalidArgumentError, MismatchError, PeerLostError, RoundAbortedError

ASYNC = {"BPS_ASYNC": "1"}
IMPATIENT = ASYNC | {"BPS_TIMEOUT": str(3 * harness.PATIENCE)}


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(30, 20)


def trained(bps: Any, steps: int) -> tuple[float, float, list[torch.Tensor]]:
    """Each rank starts with weights of its own, which are those of rank 0 as soon as there is an optimizer."""
    import bps_rdma.torch

    torch.manual_seed(7)
    wanted = torch.randn(20, 30)
    model = linear(bps.rank())
    optimizer = bps_rdma.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), model.named_parameters()
    )
    assert torch.equal(model.weight, linear(0).weight)
    torch.manual_seed(100 + bps.rank())
    test = torch.randn(200, 30)
    before = ((model(test) - test @ wanted.T) ** 2).mean().item()
    for _ in range(steps):
        x = torch.randn(16, 30)
        loss = ((model(x) - x @ wanted.T) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bps.barrier()
    optimizer.zero_grad()
    optimizer.step()  # nothing to add: what the others have added last
    return before, ((model(test) - test @ wanted.T) ** 2).mean().item(), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("staleness", ["-1", "0", "1", pytest.param("5", marks=pytest.mark.long)])
def test_ranks_train_together(staleness: str) -> None:
    results = harness.run(trained, 150, workers=3, servers=1, env=ASYNC | {"BPS_STALENESS": staleness})
    for first, last, weights in results:
        assert last < first / 4, (first, last)
        assert all(torch.equal(one, other) for one, other in zip(weights, results[0][2], strict=True))


def begins(bps: Any) -> None:
    import bps_rdma.torch

    model = linear(0)
    with pytest.raises(MismatchError, match="BPS_STALENESS=0"):
        bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    bps.barrier()


def test_staleness_that_differs_is_named() -> None:
    """Ranks with 0 meet in each step, and others never do."""
    harness.run(begins, workers=2, env=ASYNC, rank_env=[{"BPS_STALENESS": "0"}, {"BPS_STALENESS": "2"}])


def test_bytepss_name() -> None:
    results = harness.run(trained, 50, workers=2, env={"BYTEPS_ENABLE_ASYNC": "1"})
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))


@harness.on_ranks(workers=3, env=ASYNC | {"BPS_STALENESS": "0"})
def test_without_staleness_training_is_synchronous(bps: Any) -> None:
    """With staleness 0 weights are what the sum of the ranks' changes makes of them, step by step."""
    import bps_rdma.torch

    models = [linear(0) for _ in range(bps.size())]
    model = models[bps.rank()]
    optimizer = bps_rdma.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    reference = linear(0)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        weights = [p.detach().clone() for p in reference.parameters()]
        total = [torch.zeros_like(p) for p in weights]
        for rank in range(bps.size()):  # what each of them computes
            torch.manual_seed(10 * step + rank)
            reference.zero_grad()
            (reference(torch.randn(4, 30)) ** 2).sum().backward()
            plain.step()
            with torch.no_grad():
                for change, p, before in zip(total, reference.parameters(), weights, strict=True):
                    change.add_(p - before)
                    p.copy_(before)
        torch.manual_seed(10 * step + bps.rank())
        optimizer.zero_grad()
        (model(torch.randn(4, 30)) ** 2).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for p, before, change, got in zip(reference.parameters(), weights, total, model.parameters(), strict=True):
                p.copy_(before + change)
                assert torch.equal(got, p), step


@harness.on_ranks(workers=1, env=ASYNC)
def test_compression_is_refused(bps: Any) -> None:
    import bps_rdma.torch

    for how in ({"compression": bps.Int8()}, {"compression": bps_rdma.torch.Compression.bf16}, {"exact": True}):
        with pytest.raises(InvalidArgumentError, match="travel as they are"):
            bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(linear(0).parameters(), lr=0.1), **how)


def refused_by_settings(bps: Any) -> None:
    import bps_rdma.torch

    with pytest.raises(InvalidArgumentError, match=r"BPS_EXACT=1|BPS_COMPRESSION=int8"):
        bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(linear(0).parameters(), lr=0.1))
    bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(linear(0).parameters(), lr=0.1), exact=False)


@pytest.mark.parametrize("setting", [{"BPS_EXACT": "1"}, {"BPS_COMPRESSION": "int8"}])
def test_settings_that_changes_of_weights_cannot_have_are_refused(setting: dict[str, str]) -> None:
    harness.run(refused_by_settings, workers=1, env=ASYNC | setting)


class Counting:
    """Weights that begin at zero, of two dtypes, and whose every step adds one."""

    def __init__(self, elements: int) -> None:
        import bps_rdma.torch

        dtypes = (torch.float32, torch.float64)
        self.parameters = [nn.Parameter(torch.zeros(elements, dtype=dtype)) for dtype in dtypes]
        self.optimizer = bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=1.0))

    def step(self, change: float = 1) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, -change)
        self.optimizer.step()

    def values(self) -> set[float]:
        return {value for parameter in self.parameters for value in parameter.detach().unique().tolist()}


# More partitions than the servers' slots: some have not been sent when the deadline passes.
@pytest.mark.long
@harness.on_ranks(workers=2, env=IMPATIENT | {"BPS_STALENESS": "1", "BPS_TRANSPORT": "tcp"} | harness.cut_at(16384))
def test_after_a_deadline_nothing_is_lost_or_added_twice(bps: Any) -> None:
    counting = Counting(200_000)
    if bps.rank() == 0:
        counting.step()
        with pytest.raises(DeadlineError):
            counting.step()  # its change is with the servers, in part
        with pytest.raises(DeadlineError):
            counting.step()  # which must be completed first: nothing is added
        mark("told")
        while True:
            try:
                counting.step()
                break
            except DeadlineError:
                continue
    else:
        await_mark("told", 0)
        for _ in range(2):
            counting.step()
    bps.barrier()
    counting.step(0)
    assert counting.values() == {3 + 2}


@harness.on_ranks(workers=2, env=IMPATIENT | {"BPS_STALENESS": "0"})
def test_a_synchronous_step_that_failed_comes_with_the_next_one(bps: Any) -> None:
    counting = Counting(1000)
    if bps.rank() == 1:
        await_mark("told", 0)
    with pytest.raises(DeadlineError):
        counting.step()
    mark("told")
    await_mark("told", 0, 1)
    counting.step()
    assert counting.values() == {2 * 2}


@harness.on_ranks(workers=2, env=ASYNC | {"BPS_STALENESS": "0"})
def test_ranks_that_have_not_completed_the_same_steps_are_told(bps: Any) -> None:
    counting = Counting(100)
    counting.step()
    counting.optimizer._bps_steps += bps.rank()  # as if a step had failed on one rank alone
    with pytest.raises(MismatchError, match="store_weights"):
        counting.step()
    counting.optimizer.store_weights()
    before = counting.values()
    counting.step()
    assert counting.values() == {min(before) + 2}


def loads(bps: Any) -> None:
    counting = Counting(100)
    counting.step(0)
    loaded = [torch.full_like(p, 7) for p in counting.parameters]
    with torch.no_grad():  # as load_state_dict() does it
        for parameter, value in zip(counting.parameters, loaded, strict=True):
            parameter.copy_(value)
    with pytest.raises(InvalidArgumentError, match="store_weights"):
        counting.step()
    counting.optimizer.store_weights()
    with torch.no_grad():
        for parameter, value in zip(counting.parameters, loaded, strict=True):
            parameter.copy_(value)  # nothing new
    bps.barrier()
    counting.step()
    bps.barrier()
    counting.step(0)
    assert counting.values() == {7 + bps.size()}
    bps.barrier()
    counting.optimizer.unstore_weights()
    assert counting.values() == {7 + bps.size()}


@pytest.mark.parametrize("staleness", ["-1", "0"])
def test_parameters_that_were_replaced_are_not_added(staleness: str) -> None:
    harness.run(loads, workers=2, env=ASYNC | {"BPS_STALENESS": staleness})


def goes_on(bps: Any) -> float:
    import bps_rdma.torch

    model = linear(0)
    optimizer = bps_rdma.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    aborted = 0
    step = 0
    # Nobody waits for the one that is lost: they may be done before they know. In the first step after that all ranks
    # store the weights anew, together.
    again = False
    while step < 40 or bps.size() == 3 or again:
        if bps.rank() == 1 and bps.size() == 3 and step == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(torch.ones(1, 30)) ** 2).sum().backward()
        try:
            optimizer.step()
        except RoundAbortedError:
            aborted += 1
            again = True
            continue
        again = False
        step += 1
    assert bps.size() == 2
    assert aborted <= 1
    bps.barrier()
    optimizer.zero_grad()
    optimizer.step()
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def test_a_job_that_may_lose_members_goes_on() -> None:
    env = ASYNC | {"BPS_MIN_WORKERS": "1"}
    first, last = harness.run(goes_on, workers=3, servers=1, env=env, but=[1])
    assert first == last


@harness.on_ranks(workers=3, env=ASYNC | {"BPS_TRANSPORT": "tcp"}, kills="rank 1", at="stepped")
def test_a_lost_worker_that_is_a_server_takes_weights_with_it(bps: Any) -> None:
    """The weights are gone with the process that kept a part of them; every rank has them as it last saw them."""
    counting = Counting(100_000)
    counting.step()
    bps.barrier()
    mark("stepped")
    if bps.rank() == 1:
        await_mark("never")
    seen = counting.values()
    lost: PeerLostError | None = None
    while lost is None:
        seen = counting.values()
        try:
            counting.step(0)
        except PeerLostError as error:
            lost = error
    assert counting.values() <= seen


def goes_on_without(bps: Any, steps: int) -> set[float]:
    """What is lost comes back from the lowest rank; each rank hears of the loss at most once."""
    counting = Counting(100_000)
    aborted = done = 0
    while done < steps:
        try:
            counting.step()
        except RoundAbortedError:
            aborted += 1
            continue
        done += 1
        if done == 5:
            bps.barrier()
            mark("running")
        if done == steps // 2:
            await_mark("killed")
    assert aborted <= 1
    bps.barrier()
    counting.step(0)
    values = counting.values()
    # The lowest rank's weights, which are everyone's after the loss, may hold what steps that were aborted have added.
    assert max(values) <= (steps + 1) * bps.size(), values
    assert min(values) > 5
    return values


def test_a_lost_server_is_no_end_where_members_may_be_lost() -> None:
    env = ASYNC | {"BPS_MIN_WORKERS": "1"}
    one, other = harness.run(goes_on_without, 150, workers=2, servers=2, env=env, kills="server 1")
    assert one == other


def is_interrupted(bps: Any) -> set[float]:
    """Ctrl-C leaves operations that a step had begun; the view ends before the next one looks at them."""
    counting = Counting(1000)
    counting.step()
    if bps.rank() == 1:
        await_mark("never")
    if bps.rank() == 0:
        harness.is_interrupted(counting.step)
        eventually(has_ended)
        with pytest.raises(RoundAbortedError):
            counting.step()
    else:
        await_mark("lost")
        with pytest.raises(RoundAbortedError):
            bps.barrier()
    counting.step()
    assert bps.size() == 2
    return counting.values()


def test_what_ctrl_c_has_left_tells_nobody_that_the_view_has_ended() -> None:
    env = FAST | ASYNC | {"BPS_STALENESS": "0", "BPS_MIN_WORKERS": "2"}
    with harness.start(is_interrupted, workers=3, servers=1, env=env) as job:
        job.interrupt()
        job.await_marks("interrupted", [0])
        job.kill("rank 1")
        job.set_mark("lost")
        first, last = job.values(but=[1])
    assert first == last


MAKE = """
model = torch.nn.Linear(8, 3)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))


def loss_of(generator):
    bps.commit()  # a process may enter
    return model(torch.randn(16, 8, generator=generator)).square().mean()
"""
END = """
total = sum(p.double().sum().item() for p in model.parameters())
sys.stdout.write(f"end: {state.step} {total.hex()}\\n")
"""


def test_a_rank_that_enters_gets_the_weights(tmp_path: Any) -> None:
    ends = ends_of(tmp_path, make=MAKE, loss="loss_of(generator)", end=END, BPS_ASYNC="1", BPS_STALENESS="0")
    assert len({tuple(end) for end in ends}) == 1, "all have the same step and weights, to the bit"

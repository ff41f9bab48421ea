# SPDX-License-Identifier: Apache-2.0
"""Whose backward fails, or is interrupted while it waits for means, has its gradients again; no pass meets another."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest
import torch
import training
from failed_passes import SIZE, Chain
from harness import await_mark, mark
from interrupts import interrupted

from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer, gradient_pass
from bps_rdma.torch.backward import EndOfBackward
from bps_rdma.torch.cross_barrier import CrossBarrier
from bps_rdma.torch.gradient_pass import GradientPass
from bps_rdma.torch.synchronizer import GradientSynchronizer
from bps_rdma.torch.unused import UnusedParameters

BUCKET_MB = 0.001
STEP = 3  # from one point at which a rank is interrupted to the next one


Wrapped = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], None], Callable[[], None], Any]


def wrap_model(model: Chain, strategy: str, bucket_mb: float = BUCKET_MB) -> Wrapped:
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=bucket_mb)
    return ddp, ddp.finish_gradient_synchronization, ddp.zero_grad, lambda: ddp.synchronizer


def wrap_optimizer(model: Chain, strategy: str, bucket_mb: float = BUCKET_MB) -> Wrapped:
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    ours = DistributedOptimizer(sgd, model.named_parameters(), strategy=strategy, bucket_mb=bucket_mb)
    return model, ours.synchronize, ours.zero_grad, lambda: ours._bps_trained.synchronizer


WRAPS = [wrap_model, wrap_optimizer]


def gradients(model: Chain) -> list[torch.Tensor]:
    """Those that are there, each in memory of its own."""
    return [each.grad.clone() for each in model.scales if each.grad is not None]


@pytest.mark.parametrize("strategy", ["bucketed", "overlap"])
@pytest.mark.parametrize("wrap", WRAPS)
@harness.on_ranks(workers=2)
def test_whose_backward_fails_has_its_gradients_again(
    bps: Any, wrap: Callable[[Chain, str], Wrapped], strategy: str
) -> None:
    """What had been sent by then ends for all ranks, who then make another pass."""
    model, x = Chain(), torch.full((SIZE,), 1.0 + bps.rank())
    forward, finish, zero, synchronizer = wrap(model, strategy)

    def passes() -> None:
        zero()
        forward(x).backward()
        assert all(each.eq(1.5).all() for each in gradients(model))

    for _ in range(2):  # in the second one buckets are filled anew, which takes all ranks
        passes()
    zero()
    if bps.rank() == 0:
        with training.failing(model.scales[1].register_hook):
            forward(x).backward()
        kept = gradients(model)
        assert len(kept) == 2
        mark("failed")
        await_mark("sent", 1)
        assert all(map(torch.equal, gradients(model), kept)), "a gradient changed after backward() had raised"
        with pytest.raises(bps.BpsError, match=r"backward\(\) failed before the gradient"):
            finish()
    else:
        await_mark("failed", 0)
        hook = model.scales[1].register_hook(lambda _: tell_sent(synchronizer()))
        with pytest.raises(bps.RefusedError, match="worker 0 cannot take part"):
            forward(x).backward()
        hook.remove()
    for _ in range(2):
        passes()


@pytest.mark.parametrize("wrap", WRAPS)
@harness.on_ranks(workers=1)
def test_a_gradient_that_cannot_be_sent_ends_the_pass(bps: Any, wrap: Callable[[Chain, str, float], Wrapped]) -> None:
    """Otherwise the rank could do nothing any more: it never sends what other ranks may wait for."""
    model, x = Chain(), torch.ones(SIZE)
    forward, finish, zero, synchronizer = wrap(model, "bucketed", 4 * BUCKET_MB)
    for _ in range(2):
        zero()
        forward(x).backward()
    assert len(synchronizer().units) == 2
    zero()
    with training.failing(model.scales[0].register_hook):
        forward(x).backward()
    with pytest.raises(bps.BpsError, match=r"backward\(\) failed before the gradient of 'scales\.1'"):
        finish()  # the bucket of this one waits for that of the first one
    zero()
    forward(x).backward()
    assert all(each.eq(1).all() for each in gradients(model))


@harness.on_ranks(workers=2)
def test_an_error_of_one_rank_leaves_others_theirs(bps: Any) -> None:
    """A gradient is changed on a rank alone. The other one still learns which parameters were used, and has means."""
    model, x = Chain(), torch.full((SIZE,), 1.0 + bps.rank())
    forward = DistributedDataParallel(model, strategy="overlap", find_unused_parameters=True)
    waits = UnusedParameters.wait

    def wait(unused: UnusedParameters) -> None:
        mark("waits")
        waits(unused)

    def change(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1)

    if bps.rank() == 0:
        model.scales[-1].register_post_accumulate_grad_hook(change)
        with mock.patch.object(UnusedParameters, "wait", wait), pytest.raises(bps.BpsError, match="changed"):
            forward(x).backward()
        mark("waits")
    else:
        model.scales[0].register_post_accumulate_grad_hook(lambda _: await_mark("waits", 0))
        forward(x).backward()
        assert all(each.eq(1.5).all() for each in gradients(model)[:-1])  # the last one was changed on its way
    bps.barrier()


def test_what_waits_for_the_end_of_a_failed_backward_may_live_on() -> None:
    """As when a backward was to follow from an outer one. Then the next call of forget() tells of the failure."""

    class Owner:
        calls = 0
        kept = None

        def ended(self) -> None:
            raise AssertionError

        def failed(self) -> None:
            self.calls += 1

        def ask(self, _: torch.Tensor) -> None:
            end.ask()
            assert end._asked is not None
            self.kept = end._asked()
            end.forget()  # as a step in a hook does
            assert self.calls == 0
            raise ZeroDivisionError

    owner = Owner()
    end = EndOfBackward(owner.ended, owner.failed)
    x = torch.ones(1, requires_grad=True)
    x.register_hook(owner.ask)
    with pytest.raises(ZeroDivisionError):
        x.sum().backward()
    end._asked = weakref.ref(owner.kept)
    for _ in range(2):
        end.forget()
        assert owner.calls == 1


@harness.on_ranks(workers=1)
def test_a_first_pass_that_has_sent_nothing_is_still_to_come(bps: Any) -> None:
    """In the one behind it buckets are filled anew, in calls that take all ranks."""
    forward, _, zero, _ = wrap_model(Chain(), "flat")

    def backward() -> None:
        zero()
        forward(torch.ones(SIZE)).backward()

    with mock.patch.object(GradientPass, "complete", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        backward()
    with mock.patch.object(GradientSynchronizer, "rebuild") as rebuild:
        backward()
        assert not rebuild.called
        backward()
        assert rebuild.called


def tell_sent(synchronizer: Any) -> None:
    """Waits until what has been sent is over, one way or another."""
    handles = [unit._handle for unit in synchronizer.units if unit._handle is not None]
    assert len(handles) > 1
    harness.eventually(lambda: all(handle.done() for handle in handles), what="they are over")
    mark("sent")


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed"])
@pytest.mark.parametrize("wrap", WRAPS)
@harness.on_ranks(workers=2)
def test_who_is_interrupted_in_backward(bps: Any, wrap: Callable[[Chain, str], Wrapped], strategy: str) -> None:
    """Either all goes on with the next pass, or finish() is called before; no sum has parts of two passes."""
    model = Chain()
    forward, finish, zero, synchronizer = wrap(model, strategy)

    def loss(number: int) -> torch.Tensor:
        zero()
        return forward(torch.full((SIZE,), 10.0 * number + (3 if bps.rank() == 0 else 7)))

    def check(number: int, *others: float) -> None:
        for gradient in gradients(model):
            assert gradient.eq(gradient[0]).all()
            assert gradient[0] in (10 * number + 5, *others), (number, point, gradient[0])

    number, point, goes_on = 0, 0, True
    while goes_on or number < 4:
        came, before = False, synchronizer().passes if number > 0 else 0
        backward = loss(number).backward
        if bps.rank() == 0:
            came = number > 1 and interrupted(point, backward)  # at first buckets are filled, in calls that take all
            if number < 2:
                backward()
            for _ in range(10):  # calls; a few are enough
                if synchronizer().passes == before:
                    with contextlib.suppress(bps.BpsError):
                        finish() if synchronizer().open else loss(number).backward()
            assert synchronizer().passes == before + 1, point
        else:
            with contextlib.suppress(bps.PeerLostError, bps.RefusedError):
                backward()
                check(number, 5 * number + 3.5)
        number += 1
        loss(number).backward()
        check(number)
        number += 1
        goes_on = bool(bps.broadcast(np.array([came]), "goes on")[0])
        point += STEP
    assert point > 20 * STEP


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@harness.on_ranks(workers=1)
def test_a_late_step_that_fails_holds_nothing(bps: Any, error: type[BaseException]) -> None:
    """After Ctrl-C step() goes on when it is called once more; another error ends the pass."""
    model = Chain()
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(SIZE)).backward()

    backward()
    with mock.patch.object(GradientPass, "_complete", side_effect=error), pytest.raises(error):
        optimizer.step()
    assert not gradient_pass._passes
    if error is not KeyboardInterrupt:
        backward()
    optimizer.step()
    assert not gradient_pass._passes
    optimizer.synchronize()
    assert all(each.eq(0.5).all() for each in model.scales)


@pytest.mark.parametrize("exact", [False, True])
@harness.on_ranks(workers=2, interrupts=True)
def test_who_is_interrupted_makes_an_update_later(bps: Any, exact: bool) -> None:
    """Its mean is waited for once more."""
    model, x = Chain(), torch.full((SIZE,), 1.0 + bps.rank())
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = CrossBarrier(model, sgd, exact=exact, backward_passes_per_step=1 + exact)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(1 + exact):
            model(x).backward()
        optimizer.step()

    step()  # all ranks must come to the first one
    for options in optimizer.param_groups:
        options["lr"] = 0.5
    optimizer.synchronize()
    if bps.rank() == 0:
        step()
        harness.is_interrupted(optimizer.synchronize)
    else:
        await_mark("interrupted", 0)
        step()
    optimizer.synchronize()
    assert all(each.eq(1 - 0.5 * 1.5 * (1 + exact)).all() for each in model.scales)

# SPDX-License-Identifier: Apache-2.0
"""A backward fails on one rank, when sums of other gradients are complete: no rank gets means of a part of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import training
from torch import nn

import bps_rdma
from bps_rdma import Int8
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer

SIZE, LAYERS = 500, 4
FAILED = r"backward\(\) failed before the gradient of "


class Chain(nn.Module):
    """Layers one after the other, so that backward computes their gradients one after the other."""

    def __init__(self, has_rows: bool) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(SIZE) for _ in range(LAYERS))
        self.rows = nn.Embedding(8, 4, sparse=True) if has_rows else None
        if self.rows is not None:
            nn.init.ones_(self.rows.weight)

    @property
    def first(self) -> nn.Parameter:
        return self.scales[0] if self.rows is None else self.rows.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            x = self.rows(torch.arange(8)).sum() / 32 * x
        for scale in self.scales:
            x = x * scale
        return x.sum()


class Trained:
    """A model that is trained without changing its parameters.

    Args:
        what: is wrapped, the "model" or its "optimizer".
        has_rows: its first parameter has sparse gradients.
        micro_batches: whose gradients are added up.
        options: of the wrapper.
    """

    def __init__(self, what: str, *, has_rows: bool, micro_batches: int, options: dict[str, Any]) -> None:
        self.model, self._micro_batches = Chain(has_rows), micro_batches
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.0)
        if what == "model":
            self._ddp: DistributedDataParallel | None = DistributedDataParallel(self.model, **options)
            self.finish, self._zero = self._ddp.finish_gradient_synchronization, optimizer.zero_grad
            self.join = self._ddp.join
            self._synchronizer = lambda: self._ddp.synchronizer
            return
        self._ddp, named, sparse = None, self.model.named_parameters(), ["rows.weight"] if has_rows else ()
        ours: Any = DistributedOptimizer(
            optimizer, named, backward_passes_per_step=micro_batches, sparse=sparse, **options
        )
        self.finish, self._zero, self.join = ours.synchronize, ours.zero_grad, ours.join
        self._synchronizer = lambda: ours._bps_trained.synchronizer

    def make_pass(self, x: float) -> None:
        self._zero()
        for number in range(self._micro_batches):
            alone = self._ddp is not None and number < self._micro_batches - 1
            with self._ddp.no_sync() if alone else contextlib.nullcontext():
                (self._ddp or self.model)(torch.full((SIZE,), x)).backward()

    def check(self, mean: float) -> None:
        for number, scale in enumerate(self.model.scales):
            expected = torch.full((SIZE,), mean * self._micro_batches)
            torch.testing.assert_close(scale.grad, expected, rtol=0.02, atol=0, msg=f"layer {number}")

    @property
    def wrapper(self) -> DistributedDataParallel:
        assert self._ddp is not None
        return self._ddp

    @property
    def passes(self) -> int:
        return self._synchronizer().passes

    @property
    def units(self) -> list[Any]:
        return self._synchronizer().units

    def fail(self, when: str) -> None:
        """Makes a pass that fails: "early", or "late", when all gradients but the last are computed."""
        hook = self.model.first.register_hook(self.fail_late) if when == "late" else None
        with contextlib.nullcontext() if hook else self.fail_early(), pytest.raises(ZeroDivisionError):
            self.make_pass(2.0)
        if hook:
            hook.remove()

    @contextlib.contextmanager
    def fail_early(self, backwards: int = 0) -> Iterator[None]:
        """In this block the backward of the model fails before it has computed a gradient, after so many backwards."""
        forward, left = self.model.forward, backwards

        def fails(x: torch.Tensor) -> torch.Tensor:
            output = forward(x)
            between = output * 1
            output.register_hook(count)
            return between

        def count(gradient: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                training.fail(gradient)

        with mock.patch.object(self.model, "forward", fails):
            yield

    def fail_late(self, _: torch.Tensor) -> None:
        """A hook: sums of what has been sent are complete."""
        if self._synchronizer().open:
            begun = self._synchronizer()._pass._begun
            harness.eventually(lambda: all(one.done() for one in begun), what="sums are complete")
            raise ZeroDivisionError("on purpose")


def with_buffers() -> Trained:
    """After two passes. It sends nothing before the end of backward."""
    trained = Trained("model", has_rows=False, micro_batches=1, options={"strategy": "flat"})
    trained.model.register_buffer("seen", torch.zeros(4))
    for _ in range(2):
        trained.make_pass(1.0 + bps_rdma.rank())
    return trained


CASES: dict[str, dict[str, Any]] = {
    "bucketed": {},
    "flat": {"strategy": "flat"},
    "overlap": {"strategy": "overlap"},
    "naive": {"strategy": "naive"},
    "unused": {"strategy": "overlap", "find_unused_parameters": True},
    "compressed": {"compression": Int8(feedback=True), "find_unused_parameters": True},
    "exact": {"exact": True},
    "unrounded": {"exact": True},
    "rows": {},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2, env={"BPS_MIN_COMPRESS_BYTES": "0"})
def test_no_rank_gets_means_of_a_part(bps: Any, what: str, case: str) -> None:
    """Zeros in place of the rest would be means of other gradients on the rank whose backward did not fail."""
    trained = Trained(
        what, has_rows=case == "rows", micro_batches=2 if case == "unrounded" else 1,
        options={"bucket_mb": 0.001, **CASES[case]},
    )  # fmt: skip
    x = 1.0 + bps.rank()
    for _ in range(2):  # in the second one buckets are filled anew
        trained.make_pass(x)
        trained.check(1.5)
    if bps.rank() == 1:
        hook = trained.model.first.register_hook(trained.fail_late)
        with pytest.raises(ZeroDivisionError):
            trained.make_pass(x)
        hook.remove()
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
            trained.make_pass(x)
    for _ in range(2):
        trained.make_pass(x)
        trained.check(1.5)


@harness.on_ranks(workers=2)
def test_gradients_zeroed_in_place_after_the_failure_keep_nobody_waiting(bps: Any) -> None:
    """Their rank learns first that they were changed, and still tells the others why it has refused the rest."""
    trained = Trained("model", has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        hook = trained.model.scales[1].register_hook(trained.fail_late)
        with pytest.raises(ZeroDivisionError):
            trained.make_pass(2.0)
        hook.remove()
        trained.model.zero_grad(set_to_none=False)
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
            trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2)
def test_ranks_without_inputs_stay_in_join(bps: Any, what: str) -> None:
    trained = Trained(what, has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
    with trained.join():
        for batch in range(3 if bps.rank() == 1 else 0):
            if batch == 1:
                hook = trained.model.scales[1].register_hook(trained.fail_late)
                with pytest.raises(ZeroDivisionError):
                    trained.make_pass(2.0)
                hook.remove()
                with pytest.raises(bps.BpsError, match=FAILED):
                    trained.finish()
            else:
                trained.make_pass(2.0)
                trained.check(1.0)


@pytest.mark.parametrize("case", ["flat", "naive"])
@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2)
def test_who_has_sent_nothing_goes_on(bps: Any, what: str, case: str) -> None:
    """The other rank waits for the next pass of this one."""
    trained = Trained(what, has_rows=False, micro_batches=1, options=CASES[case])
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        hook = trained.model.first.register_hook(trained.fail_late)
        with pytest.raises(ZeroDivisionError):
            trained.make_pass(2.0)
        hook.remove()
    trained.make_pass(1.0 + 3 * bps.rank())
    trained.check(2.5)


@pytest.mark.parametrize("case", ["bucketed", "overlap", "rows"])
@pytest.mark.parametrize("zeroes", ["not", "to none", "in place"])
@harness.on_ranks(workers=2)
def test_who_has_sent_all_gets_means(bps: Any, zeroes: str, case: str) -> None:
    """The others have them, too, and no way to know that this backward has failed: they make their step."""
    options = {"bucket_mb": 0.001, **CASES[case]}
    trained = Trained("model", has_rows=case == "rows", micro_batches=1, options=options)
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        hook = trained.model.first.register_post_accumulate_grad_hook(trained.fail_late)
        with pytest.raises(ZeroDivisionError):
            trained.make_pass(2.0)
        hook.remove()
        if zeroes != "not":
            trained.model.zero_grad(set_to_none=zeroes == "to none")
        trained.finish()
    else:
        trained.make_pass(1.0)
    trained.check(1.5)
    trained.make_pass(1.0 + 3 * bps.rank())
    trained.check(2.5)


@pytest.mark.parametrize("fails", ["early", "late"])
@harness.on_ranks(workers=2)
def test_a_forward_that_takes_all_ranks_ends_a_failed_pass(bps: Any, fails: str) -> None:
    """The others broadcast no buffers before the pass is over for which they wait. All lose this one batch."""
    trained = with_buffers()
    if bps.rank() == 1:
        trained.fail(fails)
    else:
        with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
            trained.make_pass(1.0)
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
        trained.check(1.5)
    assert trained.passes == 5


@pytest.mark.parametrize("fails", ["early", "late"])
@pytest.mark.parametrize("workers", [1, 2])
@harness.on_ranks("workers")
def test_a_backward_that_fails_on_all_ranks_costs_one_batch(bps: Any, fails: str) -> None:
    """As one that is too large for the memory."""
    trained = with_buffers()
    for _ in range(2):
        trained.fail(fails)
        trained.make_pass(1.0 + bps.rank())
        trained.check((1 + bps.size()) / 2)


@harness.on_ranks(workers=2)
def test_the_second_of_two_losses_is_trained_where_the_backward_of_the_first_has_failed(bps: Any) -> None:
    """No forward comes between them. Nothing had been sent."""
    model = Chain(has_rows=False)
    ddp = DistributedDataParallel(model, strategy="flat")
    first, second = (ddp(torch.full((SIZE,), 1.0 + bps.rank())) for _ in range(2))

    hook = model.first.register_hook(training.fail)
    with pytest.raises(ZeroDivisionError):
        first.backward()
    hook.remove()
    ddp.zero_grad()
    second.backward()
    for scale in model.scales:
        torch.testing.assert_close(scale.grad, torch.full((SIZE,), 1.5))


@harness.on_ranks(workers=2)
def test_a_failed_pass_is_ended_by_the_next_forward_that_takes_all_ranks(bps: Any) -> None:
    """And not by one that evaluates the model."""
    trained = with_buffers()
    if bps.rank() == 1:
        trained.fail("early")
        trained.wrapper.eval()
        trained.wrapper(torch.ones(SIZE))
        trained.wrapper.train()
    else:
        with pytest.raises(bps.RefusedError):
            trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@pytest.mark.parametrize("fails", ["early", "late"])
@pytest.mark.parametrize("batches", [1, 3])
@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(20 * harness.PATIENCE)})
def test_the_last_backward_of_a_rank_in_join_fails(bps: Any, batches: int, fails: str) -> None:
    """No forward follows that ends its pass. The other rank waits for that, in one of its own or without inputs."""
    trained = with_buffers()
    with trained.join():
        for batch in range(batches if bps.rank() == 1 else 2):
            if batch < batches - 1:
                trained.make_pass(2.0)
            elif bps.rank() == 1:
                trained.fail(fails)
            elif batch == batches - 1:
                with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
                    trained.make_pass(2.0)
            else:
                trained.make_pass(2.0)
                trained.check(1.0)
    assert trained.passes == 2 + max(batches, 2)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(20 * harness.PATIENCE)})
def test_the_last_backward_of_a_rank_in_join_fails_when_it_has_sent_gradients(bps: Any) -> None:
    """It is told what to do, and does not wait for the other rank, which waits for the rest."""
    trained = Trained("model", has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        with pytest.raises(bps.BpsError, match=r"not finished.*finish_gradient_synchronization"), trained.join():
            trained.fail("late")
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError), trained.join():
            trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@pytest.mark.parametrize("batches", [1, 3])
@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(20 * harness.PATIENCE)})
def test_the_last_backward_of_a_rank_in_join_of_an_optimizer_fails(bps: Any, batches: int) -> None:
    """It has sent nothing, and no backward follows. The other rank waits in one of its own, or without inputs."""
    trained = Trained("optimizer", has_rows=False, micro_batches=1, options={"strategy": "flat"})
    with trained.join():
        for batch in range(batches if bps.rank() == 1 else 2):
            if bps.rank() == 1 and batch == batches - 1:
                trained.fail("late")
            elif bps.rank() == 0 and batch == batches - 1:
                with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
                    trained.make_pass(2.0)
            else:
                trained.make_pass(2.0)
    assert trained.passes == max(batches, 2)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(20 * harness.PATIENCE)})
def test_the_last_backward_in_join_of_an_optimizer_fails_when_it_has_sent_gradients(bps: Any) -> None:
    trained = Trained("optimizer", has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        with pytest.raises(bps.BpsError, match=r"not finished.*call synchronize\(\)"), trained.join():
            trained.fail("late")
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError), trained.join():
            trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("zeroes", [False, True])
@harness.on_ranks(workers=2)
def test_the_second_backward_of_a_graph_fails(bps: Any, zeroes: bool, has_buffers: bool) -> None:
    """No forward tells that a pass is to come, and the gradients are means of the first one, or zeroed."""
    trained = with_buffers() if has_buffers else Trained("model", has_rows=False, micro_batches=1, options={})
    passes = trained.passes
    with trained.fail_early(backwards=2 - bps.rank()):
        output = trained.wrapper(torch.full((SIZE,), 1.0 + bps.rank()))
        output.backward(retain_graph=True)
        if bps.rank() == 1:
            with pytest.raises(ZeroDivisionError):
                output.backward()
    if bps.rank() == 1:
        if zeroes:
            trained.model.zero_grad()
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
            output.backward()
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)
    assert trained.passes == passes + 3


@harness.on_ranks(workers=2)
def test_a_first_pass_that_fails_leaves_the_order_of_buckets(bps: Any) -> None:
    """It has computed no gradients, whose order would be that of backward."""
    trained = Trained("model", has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    order = [unit.name for unit in trained.units]
    parameters = [entry.name for unit in trained.units for entry in unit.entries]
    if bps.rank() == 0:
        trained.fail("early")
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError):
            trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)
    assert [entry.name for unit in trained.units for entry in unit.entries] == parameters
    assert [unit.name for unit in trained.units] == order


@pytest.mark.parametrize("case", ["bucketed", "unrounded"])
@pytest.mark.parametrize("finishes", [False, True])
@harness.on_ranks(workers=2)
def test_a_backward_fails_before_its_first_gradient(bps: Any, finishes: bool, case: str) -> None:
    """What it has not computed are no zeros, and its next pass is the one for which the others wait."""
    trained = Trained("model", has_rows=False, micro_batches=1, options=CASES[case])
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        with trained.fail_early(), pytest.raises(ZeroDivisionError):
            trained.make_pass(2.0)
        if finishes:
            with pytest.raises(bps.BpsError, match=FAILED):
                trained.finish()
    elif finishes:
        with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
            trained.make_pass(1.0)
    for _ in range(2):
        trained.make_pass(1.0 + bps.rank())
        trained.check(1.5)


@harness.on_ranks(workers=2)
def test_what_a_failed_pass_has_left_is_not_averaged_once_more(bps: Any) -> None:
    """It would meet the next gradients of another rank."""
    model = Chain(has_rows=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), bucket_mb=0.001)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.full((SIZE,), 1.0 + bps.rank())).backward()

    backward()
    hook = model.scales[1].register_hook(training.fail) if bps.rank() == 1 else None
    with pytest.raises(ZeroDivisionError if hook else bps.RefusedError):
        backward()
    if hook:
        hook.remove()
        with pytest.raises(bps.BpsError):
            optimizer.synchronize()
    for call in (optimizer.synchronize, optimizer.step):
        with pytest.raises(bps.BpsError, match=r"averaging has failed.*zero_grad\(\)"):
            call()
    assert model.scales[0].eq(1).all()
    backward()
    assert model.scales[0].grad is not None
    assert model.scales[0].grad.eq(1.5).all()


@pytest.mark.parametrize("has_batch", [False, True])
@harness.on_ranks(workers=2)
def test_what_a_failed_pass_has_left_may_be_dropped(bps: Any, has_batch: bool) -> None:
    """By the model: then gradients that the script writes are averaged, and zeros where there are none."""
    model: Any = Chain(has_rows=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer: Any = DistributedOptimizer(sgd, model.named_parameters(), bucket_mb=0.001)
    hook = model.scales[1].register_hook(training.fail) if bps.rank() == 1 else None
    with pytest.raises(ZeroDivisionError if hook else bps.BpsError):
        model(torch.ones(SIZE)).backward()
    if hook:
        hook.remove()
        with pytest.raises(bps.BpsError):
            optimizer.synchronize()
    model.zero_grad()
    if has_batch or not hook:
        for scale in model.scales:
            scale.grad = torch.full((SIZE,), 2.0 + 4 * bps.rank())
    optimizer.synchronize()
    assert all(scale.grad.eq(4.0 if has_batch else 1.0).all() for scale in model.scales)


@pytest.mark.parametrize("strategy", ["flat", "naive"])
@pytest.mark.parametrize("passes", [1, 2])
@harness.on_ranks(workers=2)
def test_who_has_sent_nothing_goes_on_without_the_optimizer(bps: Any, passes: int, strategy: Any) -> None:
    """It is the model whose gradients the script drops."""
    model: Any = Chain(has_rows=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), strategy=strategy, backward_passes_per_step=passes)
    optimizer.zero_grad()

    def backward() -> None:
        for _ in range(passes):
            model(torch.full((SIZE,), 1.0 + bps.rank())).backward()

    if bps.rank() == 1:
        for _ in range(passes - 1):
            model(torch.full((SIZE,), 2.0)).backward()
        hook = model.scales[1].register_hook(training.fail)
        with pytest.raises(ZeroDivisionError):
            model(torch.full((SIZE,), 2.0)).backward()
        hook.remove()
        model.zero_grad()
    backward()
    assert all(scale.grad.eq(1.5 * passes).all() for scale in model.scales)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2)
def test_nothing_keeps_what_a_failed_step_has_computed(bps: Any, what: str) -> None:
    """A script that skips a batch which took too much memory needs that memory for the next one."""
    trained = Trained(what, has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    trained.make_pass(1.0 + bps.rank())
    outputs = training.outputs_of(trained.model)
    gc.disable()
    hook = trained.model.scales[1].register_hook(training.fail) if bps.rank() == 1 else None
    errors = []
    try:
        trained.make_pass(1.0 + bps.rank())
    except (ZeroDivisionError, bps.RefusedError) as error:
        errors.append(str(error))
        if hook:
            hook.remove()
            try:
                trained.finish()
            except bps.BpsError as refused:
                errors.append(str(refused))
    assert len(errors) == 1 + bps.rank()
    assert len(outputs) == 1
    assert outputs[0]() is None


class TwoDtypes(nn.Module):
    """One unit for each of its two parameters, also with "flat"."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(8), torch.ones(8, dtype=torch.float64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.scales[0]).double() * self.scales[1]).sum()


def fail_to_start() -> None:
    raise RuntimeError("out of memory, on purpose")


@harness.on_ranks(workers=2)
def test_a_unit_that_cannot_be_sent_is_refused(bps: Any) -> None:
    """Whatever the error is: all ranks hear of it at once, and the next pass is right."""
    ddp = DistributedDataParallel(TwoDtypes(), strategy="flat")

    def make_pass() -> None:
        ddp.zero_grad()
        ddp(torch.full((8,), 1.0 + 2 * bps.rank())).backward()

    make_pass()
    outputs = training.outputs_of(ddp.module)
    gc.disable()
    if bps.rank() == 1:
        last: Any = ddp.synchronizer.units[-1]
        last.start = fail_to_start
        with pytest.raises(RuntimeError, match="out of memory"):
            make_pass()
        del last.start
    else:
        with pytest.raises(bps.RefusedError, match="out of memory"):
            make_pass()
    assert outputs[0]() is None
    make_pass()
    assert all(parameter.grad.eq(2).all() for parameter in ddp.parameters())


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(4 * harness.PATIENCE)})
def test_all_ranks_refuse_the_same_unit_for_reasons_of_their_own(bps: Any) -> None:
    """Each of them raises its own at once, also where that one is of the kind that the ranks would talk about."""
    ddp = DistributedDataParallel(TwoDtypes(), strategy="flat")
    errors: list[Exception] = [bps.MismatchError("one name, two sizes", "on purpose"), RuntimeError("out of memory")]

    def make_pass() -> None:
        ddp.zero_grad()
        ddp(torch.full((8,), 1.0 + 2 * bps.rank())).backward()

    def fails() -> None:
        raise errors[bps.rank()]

    make_pass()
    last: Any = ddp.synchronizer.units[-1]
    last.start = fails
    with pytest.raises(RuntimeError, match=("one name, two sizes", "out of memory")[bps.rank()]):
        make_pass()
    del last.start
    make_pass()
    assert all(parameter.grad.eq(2).all() for parameter in ddp.parameters())


@harness.on_ranks(workers=2)
def test_the_error_of_a_pass_counts_more_than_what_cannot_be_told_of_gradients(bps: Any) -> None:
    """A device that has failed gives no values."""
    trained = Trained("optimizer", has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    trained.make_pass(1.0 + bps.rank())
    hook = trained.model.scales[1].register_hook(trained.fail_late) if bps.rank() == 1 else None
    with mock.patch("bps_rdma.torch.seen_gradients.digest_of_some", side_effect=MemoryError("a failed device")):
        if hook:
            with pytest.raises(ZeroDivisionError):
                trained.make_pass(2.0)
            hook.remove()
            with pytest.raises(bps.BpsError, match=FAILED):
                trained.finish()
        else:
            with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
                trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)


@pytest.mark.parametrize("zeroes", [False, True])
@harness.on_ranks(workers=2)
def test_gradients_that_no_optimizer_zeroes(bps: Any, zeroes: bool) -> None:
    """Those of layer 2 mean nothing where the script has zeroed others that a failed backward has left."""
    model: Any = Chain(has_rows=False)
    ddp = DistributedDataParallel(model)
    sgd = torch.optim.SGD([model.scales[number] for number in (0, 1, 3)], lr=0.0)
    hook = model.scales[0].register_hook(training.fail) if bps.rank() == 1 else None
    with pytest.raises(ZeroDivisionError if hook else bps.BpsError):
        ddp(torch.ones(SIZE)).backward()
    if hook:
        hook.remove()
        with contextlib.suppress(bps.BpsError):
            ddp.finish_gradient_synchronization()
    if zeroes:
        sgd.zero_grad()
        ddp(torch.ones(SIZE)).backward()
        assert model.scales[0].grad.eq(1.0).all()
        return
    told = r"is still in the gradient of 'scales\.\d'" if hook else ""
    with pytest.raises(bps.RefusedError, match=told):
        ddp(torch.ones(SIZE)).backward()


@harness.on_ranks(workers=2)
def test_a_backward_after_a_failed_one_is_told_what_to_do(bps: Any) -> None:
    """By the optimizer, which does not see that the script zeroes gradients by the model."""
    trained = Trained("optimizer", has_rows=False, micro_batches=1, options={"bucket_mb": 0.001})
    trained.make_pass(1.0 + bps.rank())
    if bps.rank() == 1:
        hook = trained.model.scales[1].register_hook(trained.fail_late)
        with pytest.raises(ZeroDivisionError):
            trained.make_pass(2.0)
        hook.remove()
        for _ in range(2):
            trained.model.zero_grad()
            with pytest.raises(bps.BpsError, match=r"the last backward has failed.*call synchronize\(\)"):
                trained.model(torch.full((SIZE,), 2.0)).backward()
        with pytest.raises(bps.BpsError, match=FAILED):
            trained.finish()
    else:
        with pytest.raises(bps.RefusedError, match=f"worker 1 cannot take part: {FAILED}"):
            trained.make_pass(1.0)
    trained.make_pass(1.0 + bps.rank())
    trained.check(1.5)

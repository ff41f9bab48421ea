# SPDX-License-Identifier: Apache-2.0
"""A backward fails on one rank, when sums of other gradients are complete: no rank gets means of a part of it."""

import functools
import gc
from typing import Any
from unittest import mock

import harness
import pytest
import torch
import training
from failed_passes import BUCKETS, SIZE, Chain, Trained, is_told, lose, with_buffers
from torch import nn

import bps_rdma.torch as bps_torch
from bps_rdma import Int8
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer

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
    micro_batches = 2 if case == "unrounded" else 1
    trained = Trained(what, has_rows=case == "rows", micro_batches=micro_batches, **BUCKETS, **CASES[case])
    trained.make_passes(2)  # in the second one buckets are filled anew
    trained.lose()
    trained.make_passes(2)


@harness.on_ranks(workers=2)
def test_gradients_zeroed_in_place_after_the_failure_keep_nobody_waiting(bps: Any) -> None:
    """Their rank learns first that they were changed, and still tells the others why it has refused the rest."""
    trained = Trained("model", **BUCKETS)
    trained.make_passes(2)
    trained.lose(layer=1, then=functools.partial(trained.model.zero_grad, set_to_none=False))
    trained.make_passes()


@pytest.mark.parametrize("case", ["flat", "naive"])
@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2)
def test_who_has_sent_nothing_goes_on(bps: Any, what: str, case: str) -> None:
    """The other rank waits for the next pass of this one."""
    trained = Trained(what, **CASES[case])
    trained.make_passes(2)
    if bps.rank() == 1:
        trained.fail()
    trained.make_passes(factor=3)


@pytest.mark.parametrize("case", ["bucketed", "overlap", "rows"])
@pytest.mark.parametrize("zeroes", ["not", "to none", "in place"])
@harness.on_ranks(workers=2)
def test_who_has_sent_all_gets_means(bps: Any, zeroes: str, case: str) -> None:
    """The others have them, too, and no way to know that this backward has failed: they make their step."""
    trained = Trained("model", has_rows=case == "rows", **BUCKETS, **CASES[case])
    trained.make_passes(2)
    if bps.rank() == 1:
        with training.failing(trained.model.first.register_post_accumulate_grad_hook, trained.fail_late):
            trained.make_pass(2.0)
        if zeroes != "not":
            trained.model.zero_grad(set_to_none=zeroes == "to none")
        trained.finish()
    else:
        trained.make_pass()
    trained.check(1.5)
    trained.make_passes(factor=3)


@pytest.mark.parametrize("fails", ["early", "late"])
@harness.on_ranks(workers=2)
def test_a_forward_that_takes_all_ranks_ends_a_failed_pass(bps: Any, fails: str) -> None:
    """The others broadcast no buffers before the pass is over for which they wait. All lose this one batch."""
    trained = with_buffers()
    trained.fail(fails) if bps.rank() == 1 else is_told(trained.make_pass)
    trained.make_passes(2)
    assert trained.passes == 5


@pytest.mark.parametrize("fails", ["early", "late"])
@pytest.mark.parametrize("workers", [1, 2])
@harness.on_ranks("workers")
def test_a_backward_that_fails_on_all_ranks_costs_one_batch(bps: Any, fails: str) -> None:
    """As one that is too large for the memory."""
    trained = with_buffers()
    for _ in range(2):
        trained.fail(fails)
        trained.make_passes()


@harness.on_ranks(workers=2)
def test_the_second_of_two_losses_is_trained_where_the_backward_of_the_first_has_failed(bps: Any) -> None:
    """No forward comes between them. Nothing had been sent."""
    model = Chain()
    ddp = DistributedDataParallel(model, strategy="flat")
    first, second = (ddp(torch.full((SIZE,), 1.0 + bps.rank())) for _ in range(2))

    with training.failing(model.first.register_hook):
        first.backward()
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
        is_told(trained.make_pass)
    trained.make_passes()


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("zeroes", [False, True])
@harness.on_ranks(workers=2)
def test_the_second_backward_of_a_graph_fails(bps: Any, zeroes: bool, has_buffers: bool) -> None:
    """No forward tells that a pass is to come, and the gradients are means of the first one, or zeroed."""
    trained = with_buffers() if has_buffers else Trained("model")
    passes, x = trained.passes, torch.full((SIZE,), 1.0 + bps.rank())
    if bps.rank() == 1:
        with trained.failing_early(backwards=1):
            output = trained.wrapper(x)
            output.backward(retain_graph=True)
            output.backward()
        if zeroes:
            trained.model.zero_grad()
        is_told(trained.finish)
    else:
        output = trained.wrapper(x)
        output.backward(retain_graph=True)
        is_told(output.backward)
    trained.make_passes()
    assert trained.passes == passes + 3


@harness.on_ranks(workers=2)
def test_a_first_pass_that_fails_leaves_the_order_of_buckets(bps: Any) -> None:
    """It has computed no gradients, whose order would be that of backward."""
    trained = Trained("model", **BUCKETS)
    order = [(unit.name, [entry.name for entry in unit.entries]) for unit in trained.units]
    trained.lose("early")
    trained.make_passes()
    assert [(unit.name, [entry.name for entry in unit.entries]) for unit in trained.units] == order


@pytest.mark.parametrize("case", ["bucketed", "unrounded"])
@pytest.mark.parametrize("finishes", [False, True])
@harness.on_ranks(workers=2)
def test_a_backward_fails_before_its_first_gradient(bps: Any, finishes: bool, case: str) -> None:
    """What it has not computed are no zeros, and its next pass is the one for which the others wait."""
    trained = Trained("model", **CASES[case])
    trained.make_passes(2)
    if finishes:
        trained.lose("early")
    elif bps.rank() == 1:
        trained.fail("early")
    trained.make_passes(2)


@harness.on_ranks(workers=2)
def test_what_a_failed_pass_has_left_is_not_averaged_once_more(bps: Any) -> None:
    """It would meet the next gradients of another rank."""
    model = Chain()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), **BUCKETS)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.full((SIZE,), 1.0 + bps.rank())).backward()

    backward()
    lose(model.scales[1], backward, optimizer.synchronize)
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
    model: Any = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer: Any = DistributedOptimizer(sgd, model.named_parameters(), **BUCKETS)
    lose(model.scales[1], lambda: model(torch.ones(SIZE)).backward(), optimizer.synchronize)
    model.zero_grad()
    if has_batch or bps.rank() == 0:
        for scale in model.scales:
            scale.grad = torch.full((SIZE,), 2.0 + 4 * bps.rank())
    optimizer.synchronize()
    assert all(scale.grad.eq(4.0 if has_batch else 1.0).all() for scale in model.scales)


@pytest.mark.parametrize("strategy", ["flat", "naive"])
@pytest.mark.parametrize("passes", [1, 2])
@harness.on_ranks(workers=2)
def test_who_has_sent_nothing_goes_on_without_the_optimizer(bps: Any, passes: int, strategy: Any) -> None:
    """It is the model whose gradients the script drops."""
    model: Any = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), strategy=strategy, backward_passes_per_step=passes)
    optimizer.zero_grad()
    x = torch.full((SIZE,), 1.0 + bps.rank())
    if bps.rank() == 1:
        for _ in range(passes - 1):
            model(x).backward()
        with training.failing(model.scales[1].register_hook):
            model(x).backward()
        model.zero_grad()
    for _ in range(passes):
        model(x).backward()
    assert all(scale.grad.eq(1.5 * passes).all() for scale in model.scales)


@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2)
def test_nothing_keeps_what_a_failed_step_has_computed(bps: Any, what: str) -> None:
    """A script that skips a batch which took too much memory needs that memory for the next one."""
    trained = Trained(what, **BUCKETS)
    trained.make_passes()
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


def make_pass(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()
    ddp(torch.full((8,), 1.0 + 2 * bps_torch.rank())).backward()


def fail_to_start() -> None:
    raise RuntimeError("out of memory, on purpose")


@harness.on_ranks(workers=2)
def test_a_unit_that_cannot_be_sent_is_refused(bps: Any) -> None:
    """Whatever the error is: all ranks hear of it at once, and the next pass is right."""
    ddp = DistributedDataParallel(TwoDtypes(), strategy="flat")
    make_pass(ddp)
    outputs = training.outputs_of(ddp.module)
    gc.disable()
    if bps.rank() == 1:
        last: Any = ddp.synchronizer.units[-1]
        last.start = fail_to_start
        with pytest.raises(RuntimeError, match="out of memory"):
            make_pass(ddp)
        del last.start
    else:
        with pytest.raises(bps.RefusedError, match="out of memory"):
            make_pass(ddp)
    assert outputs[0]() is None
    make_pass(ddp)
    assert all(parameter.grad.eq(2).all() for parameter in ddp.parameters())


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(4 * harness.PATIENCE)})
def test_all_ranks_refuse_the_same_unit_for_reasons_of_their_own(bps: Any) -> None:
    """Each of them raises its own at once, also where that one is of the kind that the ranks would talk about."""
    ddp = DistributedDataParallel(TwoDtypes(), strategy="flat")
    errors: list[Exception] = [bps.MismatchError("one name, two sizes", "on purpose"), RuntimeError("out of memory")]
    make_pass(ddp)
    last: Any = ddp.synchronizer.units[-1]
    last.start = mock.Mock(side_effect=errors[bps.rank()])
    with pytest.raises(RuntimeError, match=("one name, two sizes", "out of memory")[bps.rank()]):
        make_pass(ddp)
    del last.start
    make_pass(ddp)
    assert all(parameter.grad.eq(2).all() for parameter in ddp.parameters())


@harness.on_ranks(workers=2)
def test_the_error_of_a_pass_counts_more_than_what_cannot_be_told_of_gradients(bps: Any) -> None:
    """A device that has failed gives no values."""
    trained = Trained("optimizer", **BUCKETS)
    trained.make_passes()
    with mock.patch("bps_rdma.torch.seen_gradients.digest_of_some", side_effect=MemoryError("a failed device")):
        trained.lose(layer=1)
    trained.make_passes()


@pytest.mark.parametrize("zeroes", [False, True])
@harness.on_ranks(workers=2)
def test_gradients_that_no_optimizer_zeroes(bps: Any, zeroes: bool) -> None:
    """Those of layer 2 mean nothing where the script has zeroed others that a failed backward has left."""
    model: Any = Chain()
    ddp = DistributedDataParallel(model)
    sgd = torch.optim.SGD([model.scales[number] for number in (0, 1, 3)], lr=0.0)
    lose(model.scales[0], lambda: ddp(torch.ones(SIZE)).backward(), ddp.finish_gradient_synchronization)
    if zeroes:
        sgd.zero_grad()
        ddp(torch.ones(SIZE)).backward()
        assert model.scales[0].grad.eq(1.0).all()
        return
    with pytest.raises(bps.RefusedError, match=r"is still in the gradient of 'scales\.\d'" if bps.rank() == 1 else ""):
        ddp(torch.ones(SIZE)).backward()


@harness.on_ranks(workers=2)
def test_a_backward_after_a_failed_one_is_told_what_to_do(bps: Any) -> None:
    """By the optimizer, which does not see that the script zeroes gradients by the model."""
    trained = Trained("optimizer", **BUCKETS)
    trained.make_passes()

    def go_on() -> None:
        for _ in range(2):
            trained.model.zero_grad()
            with pytest.raises(bps.BpsError, match=r"the last backward has failed.*call synchronize\(\)"):
                trained.model(torch.full((SIZE,), 2.0)).backward()

    trained.lose(layer=1, then=go_on)
    trained.make_passes()

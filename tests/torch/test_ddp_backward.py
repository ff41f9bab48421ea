# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel when backward runs in parts, repeatedly, not everywhere, or fails."""

import contextlib
import dataclasses
from typing import Any

import harness
import pytest
import torch
import training
from strategies import every_strategy
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

import bps_rdma
from bps_rdma.torch import DistributedDataParallel


@pytest.mark.parametrize("reentrant", [True, False])
@every_strategy(workers=2)
def test_checkpointed_activations(bps: Any, strategy: str, reentrant: bool) -> None:
    class Saving(training.Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            x = checkpoint(lambda y: torch.tanh(self.frozen(torch.relu(y))), x, use_reentrant=reentrant)
            x = checkpoint(lambda y: self.norm(self.again(torch.tanh(self.tied(y)))), x, use_reentrant=reentrant)
            return self.last(x)

    alone, model = training.seeded(training.Plain), training.seeded(Saving)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
    sgd_alone, sgd = torch.optim.SGD(alone.parameters(), lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        training.make_step(alone, sgd_alone, training.batch(step))
        training.make_step(ddp, sgd, training.share_of(bps, step).requires_grad_())
    assert training.distance(alone, model) < 1e-6


@harness.on_ranks(workers=2)
def test_a_gradient_in_two_parts(bps: Any) -> None:
    """A layer in two checkpoints of the old kind gets its gradient in two parts."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    for strategy in ("flat", "naive"):  # which send after backward
        ddp = DistributedDataParallel(training.seeded(Twice), strategy=strategy)
        alone = training.seeded(Twice)
        ddp(torch.ones(2, 8, requires_grad=True)).sum().backward()
        alone(torch.ones(2, 8, requires_grad=True)).sum().backward()
        assert torch.allclose(ddp.module.layer.weight.grad, alone.layer.weight.grad)
    ddp = DistributedDataParallel(Twice(), strategy="overlap")
    with pytest.raises(bps_rdma.BpsError, match=r"layer.* twice"):
        ddp(torch.ones(2, 8, requires_grad=True)).sum().backward()
    bps_rdma.barrier()  # what the other rank starts first fails at once when this one has left


@harness.on_ranks(workers=2)
def test_several_backwards_after_one_forward(bps: Any) -> None:
    """Two backwards after one forward, and an output that is a nest."""

    class Nest(training.Plain):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"a": out.sum(), "b": [out.pow(2).mean()]}

    ddp = DistributedDataParallel(training.seeded(Nest), bucket_mb=0.001)
    alone = training.seeded(Nest)
    for step in range(3):
        whole = alone(training.batch(step))
        (whole["a"] / bps.size()).backward(retain_graph=True)
        whole["b"][0].backward()
        mine = ddp(training.share_of(bps, step))
        mine["a"].backward(retain_graph=True)
        mine["b"][0].backward()
    for a, b in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.allclose(a.grad, b.grad, atol=1e-4)


@dataclasses.dataclass
class InDict:
    y: torch.Tensor


@dataclasses.dataclass
class InSlots:
    __slots__ = ("y",)
    y: torch.Tensor


class InOneSlot:
    __slots__ = "held"  # noqa: PLC0205

    def __init__(self, y: torch.Tensor) -> None:
        self.held = y


class InSlotOfBase(InOneSlot):
    __slots__ = ("never_set",)


class InItself:
    def __init__(self, y: torch.Tensor) -> None:
        self.me, self.named = self, {"y": y}
        self.named["named"] = self.named


PACKED = {
    "tensor": (lambda y: y, lambda out: out),
    "data class": (InDict, lambda out: out.y),
    "slots": (InSlots, lambda out: out.y),
    "one slot": (InOneSlot, lambda out: out.held),
    "slot of the base": (InSlotOfBase, lambda out: out.held),
    "itself": (InItself, lambda out: out.named["y"]),
    "distribution": (lambda y: Independent(Normal(y, 1.0), 1), lambda out: out.mean),
}


@pytest.mark.parametrize("kind", PACKED)
@harness.on_ranks(workers=2)
def test_a_backward_is_synchronised_as_its_own_forward_says(bps: Any, kind: str) -> None:
    """A forward in no_sync() comes between another forward and its backward."""
    pack, unpack = PACKED[kind]

    class Packing(training.Plain):
        def forward(self, x: torch.Tensor) -> Any:
            return pack(super().forward(x))

    alone, module = training.seeded(training.Plain), training.seeded(Packing)
    ddp = DistributedDataParallel(module)

    def model(x: torch.Tensor) -> torch.Tensor:
        return unpack(ddp(x))

    reference, mine = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, module)]
    for step in range(6):
        mine.zero_grad()
        out = model(training.share_of(bps, step))
        with ddp.no_sync():
            other = model(training.share_of(bps, step + 1))
            if step % 3 == 0:
                training.loss_of(other).backward()
        loss = training.loss_of(out) + (training.loss_of(other) if step % 3 == 1 else 0)
        loss.backward()
        mine.step()
        reference.zero_grad()
        training.loss_of(alone(training.batch(step))).backward()
        if step % 3 < 2:
            training.loss_of(alone(training.batch(step + 1))).backward()
        reference.step()
    assert training.same_everywhere(bps, module)
    assert training.distance(alone, module) < 1e-5


@harness.on_ranks(workers=1)
def test_objects_beside_an_output_get_no_hooks(bps: Any) -> None:
    """As caches of transformers, which hold tensors of the middle of the graph."""

    class Caching(training.Plain):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, InDict]:
            y = super().forward(x)
            return y.tanh(), InDict(y)

    out, cache = DistributedDataParallel(training.seeded(Caching))(training.batch(0))
    assert out._backward_hooks
    assert not cache.y._backward_hooks


@every_strategy(workers=2)
def test_a_rank_without_gradients(bps: Any, strategy: str) -> None:
    """On one rank the loss does not depend on any parameter."""
    ddp = DistributedDataParallel(nn.Linear(8, 4), strategy=strategy)
    for _ in range(2):
        ddp.zero_grad()
        out = ddp(torch.ones(2, 8))
        if bps.rank() == 0:
            out.sum().backward()
        else:
            ddp.finish_gradient_synchronization()
        assert torch.equal(ddp.module.weight.grad, torch.full((4, 8), 1.0))
        before = bps.metrics()["total"]["operations"]
        ddp.finish_gradient_synchronization()
        assert bps.metrics()["total"]["operations"] == before, "there was nothing left to do"


@every_strategy(workers=2)
def test_a_rank_without_a_batch(bps: Any, strategy: str) -> None:
    """It runs no forward either: in the first step, in a later one, and as the last of some micro-batches."""
    model = training.seeded(training.Images)
    ddp = DistributedDataParallel(model, strategy=strategy)
    for step in range(4):
        for keeps in (True, False):
            ddp.zero_grad(set_to_none=keeps)
            if step == 3:
                with ddp.no_sync():
                    ddp(training.batch(step)).sum().backward()
            if bps.rank() == 0 or step == 2:
                ddp(training.batch(step)).sum().backward()
            else:
                ddp.finish_gradient_synchronization()
            ddp.finish_gradient_synchronization()
            expected = {2: bps.size(), 3: bps.size() + 1}.get(step, 1) * training.SAMPLES / bps.size()
            torch.testing.assert_close(model.last.bias.grad, torch.full((4,), float(expected)))
            assert training.same_everywhere(bps, model)


@harness.on_ranks(workers=2)
def test_a_backward_that_fails(bps: Any) -> None:
    """What was raised in backward is raised; the next forward says what is to be done."""
    model = training.seeded(training.Plain)
    ddp = DistributedDataParallel(model, bucket_mb=0.001)
    for _ in range(2):
        with training.failing(model.first.weight.register_hook):
            ddp(torch.ones(2, 8)).sum().backward()
        with pytest.raises(bps_rdma.BpsError, match="finish_gradient_synchronization"):
            ddp(torch.ones(2, 8))
        with pytest.raises(bps_rdma.BpsError, match=r"backward\(\) failed before the gradient of"):
            ddp.finish_gradient_synchronization()
        ddp.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        assert model.first.weight.grad is not None


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": str(2 * harness.PATIENCE)})
def test_a_pass_that_failed_is_made_again_while_its_error_lives(bps: Any) -> None:
    """It does not stand in the way of the next one, although the error holds it."""
    model = DistributedDataParallel(training.seeded(training.Plain), strategy="naive")
    training.loss_of(model(training.batch(0))).backward()
    if bps.rank() == 1:
        harness.await_mark("failed", 0)
    try:
        training.loss_of(model(training.batch(1))).backward()
    except bps.BpsError:
        harness.mark("failed")
        model.zero_grad()
        training.loss_of(model(training.batch(bps.rank()))).backward()
    else:
        raise AssertionError("the other rank was not there")
    gradient = model.module.first.weight.grad
    theirs = bps_rdma.torch.all_gather(gradient.reshape(1, -1), "gradients")
    assert torch.equal(theirs[0], theirs[1])


@every_strategy(workers=2)
def test_a_penalty_on_the_mean(bps: Any, strategy: str) -> None:
    """With create_graph=True, .grad is the mean, and has the graph of this rank's own gradient."""
    alone = training.seeded(training.Plain)
    ddp = DistributedDataParallel(training.seeded(training.Plain), strategy=strategy)
    for step in range(2):
        for model, x in ((alone, training.batch(step)), (ddp, training.share_of(bps, step))):
            model.zero_grad()
            training.loss_of(model(x)).backward(create_graph=True)
            penalty = sum(each.grad.square().sum() for each in model.parameters() if each.grad is not None)
            (training.loss_of(model(x)) + penalty).backward()
        for mine, theirs in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            assert mine.grad is theirs.grad is None or torch.allclose(mine.grad, theirs.grad, atol=1e-5)


@every_strategy(workers=2)
def test_a_forward_that_returns_a_parameter(bps: Any, strategy: str) -> None:
    """It gets no hook with each forward, and its gradient is a mean as all others are."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.bias

    ddp = DistributedDataParallel(Scaled(8, 4), strategy=strategy)
    for _ in range(3):
        ddp.zero_grad()
        out, bias = ddp(torch.ones(2, 8))
        (out.sum() + bps.rank() * bias.sum()).backward()
        assert torch.equal(bias.grad, torch.full((4,), 2.5))
        assert not bias._backward_hooks


@every_strategy(workers=2)
def test_a_returned_parameter_follows_the_forward_of_its_backward(bps: Any, strategy: str) -> None:
    """As the scale of CLIP's loss, whose gradient arrives before those that the forward computed."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.scale

    def backward(outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        (outputs[0] * outputs[1]).sum().backward()

    def samples(step: int, rank: int) -> torch.Tensor:
        return torch.full((2, 8), 1.0 + step + 3 * rank)

    alone = training.seeded(Scaled)
    for step in range(2):
        for rank in range(2):
            backward(alone(samples(step, rank)))
    ddp = DistributedDataParallel(training.seeded(Scaled), strategy=strategy, find_unused_parameters=True)
    for order in (("alone", "all"), ("all", "alone")):
        ddp.zero_grad()
        outputs = {}
        for step, kind in enumerate(order):
            with contextlib.nullcontext() if kind == "all" else ddp.no_sync():
                outputs[kind] = ddp(samples(step, bps.rank()))
        before = bps.metrics()["total"]["operations"]
        backward(outputs["alone"])
        assert bps.metrics()["total"]["operations"] == before, order
        backward(outputs["all"])
        for mine, theirs in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad / 2, msg=str(order))
    ddp.zero_grad()
    ddp(samples(0, bps.rank()))[1].sum().backward()  # that parameter alone
    torch.testing.assert_close(ddp.module.scale.grad, torch.ones(4))
    assert ddp.module.weight.grad is None or not ddp.module.weight.grad.any()

# SPDX-License-Identifier: Apache-2.0
"""A traversal of the graph that adds no gradient to a parameter starts nothing between the ranks."""

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from strategies import with_every_strategy
from torch import nn
from torch.utils.checkpoint import checkpoint

from bps_rdma.torch import DistributedDataParallel


class Branches(nn.Module):
    """Two outputs, each of a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (n, 8) makes (n, 4) twice."""
        return self.left(x), self.right(x)


def wrapped(strategy: str, make: Callable[[], nn.Module]) -> Any:
    return DistributedDataParallel(
        training.seeded(make), strategy=strategy, bucket_mb=0.0005, find_unused_parameters=True
    )


def inputs(number: int) -> torch.Tensor:
    return torch.full((2, 8), float(number)).requires_grad_()


def of_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x).sum(), x)[0]


def into_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x).sum().backward(inputs=[x])
    assert x.grad is not None
    return x.grad


def jacobian(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: Any = torch.autograd.functional.jacobian(lambda y: model(y).sum(), x)
    return found


def functional(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: Any = torch.func.grad(lambda y: model(y).sum())(x)
    return found


def functional_of_parameters(model: Any, x: torch.Tensor) -> torch.Tensor:
    values = {name: value.detach() for name, value in model.named_parameters()}
    torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).sum())(values)
    found: Any = torch.func.jacrev(lambda y: model(y).sum())(x)
    return found


def of_parameters(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)[0]


def frozen(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A saliency map as many scripts have it: the parameters are frozen for a moment."""
    model.requires_grad_(False)
    model(x).sum().backward()
    model.requires_grad_(True)
    assert x.grad is not None
    return x.grad


TRAVERSALS = [of_input, into_input, jacobian, functional, functional_of_parameters, of_parameters, frozen]


def gradients_of_inputs_on_one_rank(bps: Any, strategy: str) -> None:
    """One rank looks at gradients of its inputs between steps, 1, 2 and 3 times; the means are those of all ranks."""
    for reentrant in (False, True):
        ddp = wrapped(strategy, lambda: nn.Linear(8, 1, bias=False))
        for step, traverse in enumerate(TRAVERSALS * 2):
            if bps.rank() == 1:
                ddp.eval()
                before = bps.metrics()["total"]["operations"]
                for _ in range(step % 3 + 1):
                    assert torch.equal(traverse(ddp, inputs(1)).detach().reshape(-1)[:8], looked_at(ddp, traverse))
                assert bps.metrics()["total"]["operations"] == before, f"{traverse.__name__} sent something"
                ddp.train()
            ddp.zero_grad()
            x = inputs(2 * bps.rank() + 1)
            out = checkpoint(ddp, x, use_reentrant=True) if reentrant else ddp(x)
            out.sum().backward()
            # Two samples each, of ones on rank 0 and threes on rank 1.
            assert torch.equal(ddp.module.weight.grad, torch.full((1, 8), 4.0)), traverse.__name__


def looked_at(ddp: Any, traverse: Any) -> torch.Tensor:
    return torch.full((8,), 2.0) if traverse is of_parameters else ddp.module.weight.detach()[0]


def adversarial_steps_that_stop_early_on_one_rank(bps: Any, strategy: str) -> None:
    """Inputs are moved up their gradient first, for fewer steps on rank 0."""
    ddp, model = wrapped(strategy, training.Plain), training.seeded(training.Plain)
    sgd, sgd_alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, model))

    def moved(m: Any, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = x.detach().requires_grad_()
            x = x + 0.1 * torch.autograd.grad(training.loss_of(m(x)), x)[0].sign()
        return x.detach()

    for step in range(4):
        sgd.zero_grad()
        sgd_alone.zero_grad()
        shares = [training.batch(step, *training.share(rank, bps.size())) for rank in range(bps.size())]
        for rank, x in enumerate(shares):
            (training.loss_of(model(moved(model, x, 1 + rank))) / bps.size()).backward()
        training.loss_of(ddp(moved(ddp, shares[bps.rank()], 1 + bps.rank()))).backward()
        sgd.step()
        sgd_alone.step()
        assert training.distance(model, ddp.module) < 1e-6


def backward_through_a_backward(bps: Any, strategy: str) -> None:
    """The loss has the gradient of the output with respect to the input in it: backward through a backward."""
    ddp, model = wrapped(strategy, training.Plain), training.seeded(training.Plain)

    def loss_of(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        slope = torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]
        return training.loss_of(m(x)) + (slope.norm(dim=1) - 1).pow(2).mean()

    for step in range(3):
        ddp.zero_grad()
        model.zero_grad()
        loss_of(model, training.batch(step)).backward()
        loss_of(ddp, training.share_of(bps, step)).backward(create_graph=step == 2)
        for mine, theirs in zip(ddp.module.parameters(), model.parameters(), strict=True):
            assert mine.grad is None if theirs.grad is None else torch.allclose(mine.grad, theirs.grad, atol=1e-5)


def one_of_several_outputs(bps: Any, strategy: str) -> None:
    """Each rank uses another output; one looks at the other output's gradient first."""
    ddp = wrapped(strategy, Branches)
    for step in range(3):
        ddp.zero_grad()
        x = inputs(1)
        outputs = ddp(x)
        if bps.rank() == 1:
            torch.autograd.grad(outputs[0].sum(), x, retain_graph=True)
        outputs[(bps.rank() + step) % 2].sum().backward()
        for layer in (ddp.module.left, ddp.module.right):
            assert torch.equal(layer.weight.grad, torch.full((4, 8), 1.0))


def backward_into_some_parameters(bps: Any, strategy: str) -> None:
    """backward(inputs=[...]) into some of the parameters is a backward of the module, which others take part in."""
    ddp = wrapped(strategy, lambda: nn.Linear(8, 1))
    for rank_of_some in (0, 1):
        ddp.zero_grad()
        loss = ddp(inputs(1)).sum()
        loss.backward(inputs=[ddp.module.bias]) if bps.rank() == rank_of_some else loss.backward()
        assert torch.equal(ddp.module.weight.grad, torch.full((1, 8), 1.0))
        assert torch.equal(ddp.module.bias.grad, torch.full((1,), 2.0))


def a_backward_past_the_parameters(bps: Any, strategy: str) -> None:
    """A backward that goes through the module, but past its parameters on one rank: these count as zeros there."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
            return x * 1.0 if skips else checkpoint(self.layer, x, use_reentrant=True)

    ddp = wrapped(strategy, Skipping)
    for step in range(4):
        ddp.zero_grad()
        before = nn.Linear(8, 8)  # whose output the module gets
        ddp(before(inputs(1)), (bps.rank() + step) % 2 == 0).sum().backward()
        assert before.weight.grad is not None
        assert ddp.module.layer.weight.grad is not None
        assert bool(ddp.module.layer.weight.grad.ne(0).any())


def a_backward_after_one_that_failed(bps: Any, strategy: str) -> None:
    """After a backward that failed before it reached the module, the next one is synchronised."""
    ddp = wrapped(strategy, lambda: nn.Linear(8, 1, bias=False))

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    out = ddp(inputs(1))
    loss = out.sum()
    hook = ddp.module.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    hook.remove()
    loss.backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((1, 8), 2.0))


@pytest.mark.parametrize("body", [
    gradients_of_inputs_on_one_rank, adversarial_steps_that_stop_early_on_one_rank, backward_through_a_backward,
    one_of_several_outputs, backward_into_some_parameters, a_backward_past_the_parameters,
    a_backward_after_one_that_failed,
])  # fmt: skip
def test_gradients(body):
    harness.run(with_every_strategy, body, workers=2)

# SPDX-License-Identifier: Apache-2.0
"""Gradients that a script puts into .grad by itself are not averaged: an optimizer that would use them is stopped."""

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from strategies import every_strategy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bps_rdma.errors import BpsError
from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer, ShardedOptimizer


def put(gradients: Any, model: Any) -> None:
    for parameter, gradient in zip(trained_of(model), gradients, strict=True):
        parameter.grad = gradient


def trained_of(model: Any) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def gradients_of(model: Any, x: torch.Tensor, **options: Any) -> Any:
    return torch.autograd.grad(training.loss_of(model(x)), trained_of(model), **options)


def sgd_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sharded_of(model: Any) -> torch.optim.Optimizer:
    return ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


@every_strategy()
def test_an_optimizer_does_not_use_them(bps: Any, strategy: str) -> None:
    """In the first step, after others, with what several forwards give, and by a ShardedOptimizer."""
    for make in (sgd_of, sharded_of):
        model: Any = DistributedDataParallel(training.seeded(training.Plain), strategy=strategy)
        optimizer = make(model)
        for step in range(4):
            optimizer.zero_grad()
            x = training.share_of(bps, step)
            if step % 2:
                training.loss_of(model(x)).backward()
                optimizer.step()
                continue
            before = [each.clone() for each in model.parameters()]
            sums = [a + b for a, b in zip(gradients_of(model, x), gradients_of(model, x), strict=True)]
            put(sums, model)
            with pytest.raises(BpsError, match=r"'first\.weight' comes from torch\.autograd\.grad"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
        assert training.same_everywhere(bps, model)


@harness.on_ranks(workers=2)
def test_an_optimizer_does_not_use_those_of_functions(bps: Any) -> None:
    """A module that is called with other tensors in place of its parameters gives gradients of these."""
    model: Any = DistributedDataParallel(training.seeded(training.Plain))

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return training.loss_of(torch.func.functional_call(model, weights, (x,)))

    optimizer = sgd_of(model)
    for step in range(3):
        optimizer.zero_grad()
        weights = {name: each.detach() for name, each in model.named_parameters()}
        found = torch.func.grad(loss)(weights, training.share_of(bps, step))
        put([found[name] for name, each in model.named_parameters() if each.requires_grad], model)
        with pytest.raises(BpsError, match=r"'first\.weight' comes from .* torch\.func\.grad"):
            optimizer.step()


def inner_steps(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """As meta-learning: a step on copies of the weights, and backward through it."""
    weights = dict(model.named_parameters())
    found = gradients_of(model, x, create_graph=True)
    names = [name for name, each in weights.items() if each.requires_grad]
    moved = {name: weights[name] - 0.1 * each for name, each in zip(names, found, strict=True)}
    training.loss_of(torch.func.functional_call(model, {**weights, **moved}, (x,), tie_weights=True)).backward()
    optimizer.step()


def curvature(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """As second-order optimizers: derivatives of the gradients, after backward; it makes new tensors of the means."""
    loss = training.loss_of(model(x))
    loss.backward(retain_graph=True)
    slopes = torch.autograd.grad(loss, trained_of(model), create_graph=True)
    torch.autograd.grad(sum(each.pow(2).sum() for each in slopes), trained_of(model))
    put([each.grad * 0.5 for each in trained_of(model) if each.grad is not None], model)
    optimizer.step()


def looked_at(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """For a log, before backward and after it; the means are clipped then."""
    gradients_of(model, x)
    training.loss_of(model(x)).backward()
    gradients_of(model, x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def of_another_model(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Another optimizer makes its step meanwhile."""
    other = torch.nn.Linear(8, 4)
    gradients_of(model, x)
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    training.loss_of(model(x)).backward()
    optimizer.step()


def scaled(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Means that are looked beside, and then replaced."""
    training.loss_of(model(x)).backward()
    gradients_of(model, x)
    put([each.grad * 0.5 for each in trained_of(model) if each.grad is not None], model)
    optimizer.step()


def by_the_script_with_ours(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """It averages by itself what the wrapper gives."""
    import bps_rdma.torch as bps

    put([bps.push_pull(each) for each in gradients_of(model, x)], model)
    optimizer.step()


def by_the_script(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """It averages by itself what the module alone gives."""
    import bps_rdma.torch as bps

    put([bps.push_pull(each) for each in gradients_of(model.module, x)], model)
    optimizer.step()


def many_at_once(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    import bps_rdma.torch as bps

    put(bps.push_pull_many(gradients_of(model, x)), model)
    optimizer.step()


def in_a_flat_buffer(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """As bfloat16, which is half as long."""
    import bps_rdma.torch as bps

    found = gradients_of(model, x)
    flat = bps.push_pull(torch.nn.utils.parameters_to_vector(found).bfloat16()).float()
    put([part.view_as(each) for part, each in zip(flat.split([g.numel() for g in found]), found, strict=True)], model)
    optimizer.step()


def by_torch(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Its backend is ours."""
    import torch.distributed as dist

    found = gradients_of(model, x)
    for each in found:
        dist.all_reduce(each)
    put([each / dist.get_world_size() for each in found], model)
    optimizer.step()


def at_a_root(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """It gets all, and sends the means back."""
    import bps_rdma.torch as bps

    found = gradients_of(model, x)
    for each in found:
        parts = bps.gather(each[None].contiguous(), root=0)
        if parts is not None and bps.rank() == 0:
            each.copy_(parts.mean(0))
        bps.broadcast(each, 0)
    put(found, model)
    optimizer.step()


def one_after_the_other(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Each gradient is asked for, and averaged, by itself; then two optimizers use a half each."""
    import bps_rdma.torch as bps

    loss, trained = training.loss_of(model(x)), trained_of(model)
    for each in trained:
        each.grad = bps.push_pull(torch.autograd.grad(loss, each, retain_graph=True)[0])
    for half in (trained[::2], trained[1::2]):
        torch.optim.SGD(half, lr=0.1).step()


def by_another_wrapper(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """It averages what it finds in .grad, and the plain optimizer makes the step."""
    other: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    put(gradients_of(model, x), model)
    other.synchronize()
    optimizer.step()


USES = [
    inner_steps, curvature, looked_at, of_another_model, scaled, by_the_script, by_the_script_with_ours, many_at_once,
    in_a_flat_buffer, by_torch, at_a_root, one_after_the_other, by_another_wrapper,
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
@harness.on_ranks(workers=2)
def test_what_does_not_use_them_goes_on(bps: Any, use: Callable[[Any, Any, torch.Tensor], None]) -> None:
    if use is by_torch:
        torch.distributed.init_process_group("bps")
    model: Any = DistributedDataParallel(training.seeded(training.Plain))
    alone = training.seeded(training.Plain)
    optimizer = sgd_of(model)
    for step in range(3):
        optimizer.zero_grad()
        use(model, optimizer, training.share_of(bps, step))
    assert training.same_everywhere(bps, model)
    assert training.distance(alone, model) > 0, "it has trained"


@harness.on_ranks()
def test_a_rank_alone_uses_its_own(bps: Any) -> None:
    """Nobody else has other gradients; and one rank of two may train a model of its own."""
    group = bps.new_group([bps.rank()])
    model = DistributedDataParallel(training.seeded(training.Plain), group=group)
    put(gradients_of(model, training.share_of(bps, 0)), model)
    sgd_of(model).step()
    assert training.distance(training.seeded(training.Plain), model) > 0


@harness.on_ranks(workers=2)
def test_a_rank_uses_its_own_from_inside_of_no_sync(bps: Any) -> None:
    """Those of the inputs were asked for before, which only returns gradients of the inputs."""
    model: Any = DistributedDataParallel(training.seeded(training.Plain))
    optimizer, x = sgd_of(model), training.share_of(bps, 0)
    torch.func.grad(lambda inputs: training.loss_of(model(inputs)))(x)
    with model.no_sync():
        training.loss_of(model(x)).backward()
    optimizer.step()
    assert training.distance(training.seeded(training.Plain), model) > 0


@harness.on_ranks()
def test_other_hooks_of_optimizers_run_as_well(bps: Any) -> None:
    """Two models are looked at, and the program has a hook of its own behind those of both."""
    models: Any = [DistributedDataParallel(training.seeded(training.Plain)) for _ in range(2)]
    optimizers = [sgd_of(model) for model in models]
    x, steps = training.share_of(bps, 0), []
    for model in models:
        gradients_of(model, x)
    hook = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    try:
        for model, optimizer in zip(models, optimizers, strict=True):
            put(gradients_of(model, x), model)
            with pytest.raises(BpsError, match=r"torch\.autograd\.grad"):
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            training.make_step(model, optimizer, x)
    finally:
        hook.remove()
    assert len(steps) == 2
    assert training.same_everywhere(bps, models[0])


class Large(torch.nn.Module):
    """More buffers than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 64)
        self.register_buffer("seen", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 64)."""
        found: torch.Tensor = self.last(x)
        return found


@harness.on_ranks(workers=2)
def test_other_operations_do_not_count(bps: Any) -> None:
    """A script logs its loss meanwhile, and trains another, larger model."""
    import bps_rdma.torch

    def log(_: Any, x: torch.Tensor) -> None:
        bps_rdma.torch.push_pull(x.mean(), "loss")
        bps.barrier()

    def look_again(model: Any, x: torch.Tensor) -> None:
        model(x)

    larger = [torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.Linear(256, 4)) for _ in range(3)]
    for each in larger:
        bps_rdma.torch.broadcast_parameters(each.state_dict())
    trained: Any = DistributedDataParallel(larger[0])
    sgd: Any = DistributedOptimizer(sgd_of(larger[1]), larger[1].named_parameters())
    late: Any = CrossBarrier(larger[2], sgd_of(larger[2]), larger[2].named_parameters())

    def train(_: Any, x: torch.Tensor) -> None:
        for each in (trained, *larger[1:]):
            training.loss_of(each(x)).backward()
        sgd.step()
        late.step()
        late.synchronize()
        for each in (*larger, late):
            each.zero_grad()

    train(None, training.share_of(bps, 0))  # in the first pass the ranks agree on what they train, as texts
    for use in (log, look_again, train):
        model: Any = DistributedDataParallel(training.seeded(Large))
        optimizer = sgd_of(model)
        for step in range(2):
            optimizer.zero_grad()
            found = gradients_of(model, training.share_of(bps, step))
            use(model, training.share_of(bps, step))
            put(found, model)
            for _ in range(2):
                with pytest.raises(BpsError, match=r"'last\.weight' comes from torch\.autograd\.grad"):
                    optimizer.step()
        training.make_step(model, optimizer, training.share_of(bps, 0))


@harness.on_ranks(workers=2)
def test_sparse_ones_that_the_script_averages_are_used(bps: Any) -> None:
    """They have fewer elements than the parameter."""
    import bps_rdma.torch

    inner = torch.nn.Embedding(1000, 4, sparse=True)
    bps_rdma.torch.broadcast_parameters(inner.state_dict())
    model: Any = DistributedDataParallel(inner)
    optimizer = sgd_of(model)
    places = torch.tensor([bps.rank(), 5])
    for _ in range(2):
        optimizer.zero_grad()
        own = torch.autograd.grad(model(places).pow(2).sum(), inner.weight)[0].coalesce()
        inner.weight.grad = own
        with pytest.raises(BpsError, match=r"'weight' comes from torch\.autograd\.grad"):
            optimizer.step()
        rows = bps_rdma.torch.all_gather(own.indices()[0].contiguous())
        values = bps_rdma.torch.all_gather(own.values().contiguous())
        inner.weight.grad = torch.sparse_coo_tensor(rows[None], values / 2, inner.weight.shape)
        optimizer.step()
    assert training.same_everywhere(bps, inner)

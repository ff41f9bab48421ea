# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer and CrossBarrier: the same course as one process on the whole batch."""

from typing import Any

import harness
import pytest
import torch
import training
from torch import nn

import bps_rdma
from bps_rdma.torch import Compression, CrossBarrier, DiLoCo, DistributedOptimizer, broadcast_parameters

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
KINDS = ["overlap", "bucketed", "naive", "flat", "cross barrier"]
SHORT = {("naive", 1), ("cross barrier", 4), *((kind, 2) for kind in KINDS)}


def start(bps: Any, make: Any = training.Plain) -> tuple[nn.Module, nn.Module]:
    """(a model for one process, the same for this rank), after a broadcast from rank 0."""
    model = training.seeded(make, bps.rank())
    broadcast_parameters(model.state_dict(), root_rank=0)
    return training.seeded(make), model


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param(kind, workers, marks=() if (kind, workers) in SHORT else pytest.mark.long)
        for kind in KINDS
        for workers in (1, 2, 4)
    ],
)
@harness.on_ranks("workers")
def test_weights_are_those_of_one_process(bps: Any, kind: str) -> None:
    for name, optimizer in OPTIMIZERS.items():
        alone, model = start(bps)
        reference = optimizer(alone.parameters())
        mine = optimizer(model.parameters())
        if kind == "cross barrier":
            mine = CrossBarrier(model, mine)
        else:
            mine = DistributedOptimizer(mine, model.named_parameters(), strategy=kind, bucket_mb=0.001)
        assert isinstance(mine, torch.optim.Optimizer)
        assert type(mine).__name__ == type(reference).__name__
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5) for o in (reference, mine)]
        for step in range(8):
            for o, m, x in ((reference, alone, training.batch(step)), (mine, model, training.share_of(bps, step))):
                training.make_step(m, o, x)
            for scheduler in schedulers:
                scheduler.step()
        if kind == "cross barrier":
            mine.synchronize()
        assert training.same_everywhere(bps, model), name
        assert training.distance(alone, model) < 2e-6, name


# ---- DistributedOptimizer


@harness.on_ranks(workers=2)
def test_gradients_of_several_backward_passes_are_added_up(bps: Any) -> None:
    for waits, wrap in (
        (True, lambda o, m: DistributedOptimizer(o, m.named_parameters(), backward_passes_per_step=3)),
        (True, lambda o, m: DistributedOptimizer(o, m.named_parameters(), Compression.none, 3, "bucketed")),
        (False, lambda o, m: CrossBarrier(m, o, backward_passes_per_step=3)),
    ):
        alone, model = start(bps)
        reference = torch.optim.SGD(alone.parameters(), lr=0.05)
        mine = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for step in range(0, 12, 3):
            reference.zero_grad()
            mine.zero_grad()
            before = bps.metrics()["total"]["operations"]
            for micro in range(3):
                training.loss_of(alone(training.batch(step + micro))).backward()
                training.loss_of(model(training.share_of(bps, step + micro))).backward()
                if waits and micro < 2:
                    assert bps.metrics()["total"]["operations"] == before, "sent before the last pass"
            reference.step()
            mine.step()
        mine.synchronize()
        assert training.distance(alone, model) < 1e-6


@harness.on_ranks(workers=2)
def test_backward_passes_are_counted(bps: Any) -> None:
    """A further pass is averaged for itself; where means are exact it would be rounded in between, and is refused."""
    model = nn.Linear(2, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), exact=True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(bps_rdma.BpsError, match=r"again before step\(\).*backward_passes_per_step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))
    optimizer.step()


@pytest.mark.parametrize("exact", [False, True])
@harness.on_ranks(workers=2)
def test_a_step_that_fails_on_one_rank_can_be_called_again_there(bps: Any, exact: bool) -> None:
    """It averages nothing: the other rank has gone on, and what this one sends belongs to the next step."""
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), exact=exact)
    fails = [False]

    def fail(*_: Any) -> None:
        if fails.pop():
            raise ZeroDivisionError("on purpose")

    optimizer.register_step_pre_hook(fail)
    expected = 0.0
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 4), 10.0**step * (1 + 2 * bps.rank()))).sum().backward()
        expected -= 2 * 10.0**step
        fails = [False, step == 1 and bps.rank() == 1]
        if fails[-1]:
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
        optimizer.step()
        assert model.weight.eq(expected).all()


@harness.on_ranks(workers=2)
def test_gradients_can_be_clipped_before_the_step(bps: Any) -> None:
    """The norm of the means is clipped, in three ways that BytePS's and Horovod's users write."""
    alone, model = start(bps)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    mine = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(6):
        reference.zero_grad()
        training.loss_of(alone(training.batch(step))).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        reference.step()
        mine.zero_grad()
        training.loss_of(model(training.share_of(bps, step))).backward()
        mine.synchronize()
        before = bps.metrics()["total"]["operations"]
        assert torch.allclose(nn.utils.clip_grad_norm_(model.parameters(), 0.1), norm, atol=1e-6)
        if step % 2:
            with mine.skip_synchronize():
                mine.step()
        else:
            mine.step()
        assert bps.metrics()["total"]["operations"] == before, "step() synchronised again"
    assert training.distance(alone, model) < 1e-6


@harness.on_ranks(workers=2)
def test_closures(bps: Any) -> None:
    """With LBFGS, which evaluates the closure several times and compares losses."""
    alone, model = start(bps)
    pairs = []
    for m, x, wrap in ((alone, training.batch(0), False), (model, training.share_of(bps, 0), True)):
        trained = [p for p in m.parameters() if p.requires_grad]
        lbfgs: Any = torch.optim.LBFGS(trained, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        if wrap:
            lbfgs = DistributedOptimizer(lbfgs, m.named_parameters())

        def closure(m: Any = m, x: Any = x, lbfgs: Any = lbfgs) -> torch.Tensor:
            lbfgs.zero_grad()
            loss = training.loss_of(m(x))
            loss.backward()
            return loss

        pairs.append([float(lbfgs.step(closure)) for _ in range(4)])
    assert pairs[0] == pytest.approx(pairs[1], abs=1e-4)
    assert training.distance(alone, model) < 1e-3
    assert training.same_everywhere(bps, model)


@harness.on_ranks(workers=2)
def test_unused_parameters_are_as_in_one_process(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for kind in ("overlap", "bucketed", "cross barrier"):
        alone, model = start(bps, training.Branching)
        adam_alone, adam = (torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (alone, model))
        adam = (
            CrossBarrier(model, adam, find_unused_parameters=True)
            if kind == "cross barrier"
            else DistributedOptimizer(adam, model.named_parameters(), strategy=kind, find_unused_parameters=True)
        )
        for step in range(6):
            shares = [training.batch(step, *training.share(other, size)) for other in range(size)]
            adam_alone.zero_grad()
            losses = [training.loss_of(alone(x, (other + step) % 2)) for other, x in enumerate(shares)]
            (sum(losses) / size).backward()  # type: ignore[union-attr]
            adam_alone.step()
            training.make_step(model, adam, shares[rank], (rank + step) % 2)
        adam.synchronize() if kind == "cross barrier" else None
        assert training.distance(alone, model) < 1e-5, kind
        assert torch.equal(model.never.weight, training.seeded(training.Branching).never.weight)


@harness.on_ranks(workers=2)
def test_wrapping(bps: Any) -> None:
    """State, options, schedulers and hooks of the optimizer are kept; mistakes are told."""
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    sgd.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)  # made before wrapping
    steps: list[Any] = []
    sgd.register_step_post_hook(lambda *_: steps.append(1))
    mine = DistributedOptimizer(sgd, model.named_parameters())
    assert mine.state is sgd.state
    assert len(mine.state) == 2
    mine.zero_grad()
    before = bps.metrics()["total"]["operations"]
    model(torch.ones(1, 2)).sum().backward()
    mine.step()
    assert bps.metrics()["total"]["operations"] > before
    assert steps == [1]
    scheduler.step()
    assert mine.param_groups[0]["lr"] == 0.05
    saved = mine.state_dict()
    mine.load_state_dict(saved)
    model(torch.ones(1, 2)).sum().backward()
    mine.step()
    assert steps == [1, 1], "a hook ran twice"
    with pytest.raises(bps_rdma.InvalidArgumentError, match="distributed already"):
        DistributedOptimizer(mine, model.named_parameters())
    two = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    fresh = torch.optim.SGD(two.parameters(), lr=0.1)
    with pytest.raises(bps_rdma.InvalidArgumentError, match="same name: x"):
        DistributedOptimizer(fresh, [("x", p) for p in two.parameters()])
    with pytest.raises(bps_rdma.InvalidArgumentError, match="1 parameters of the optimizer have no name"):
        DistributedOptimizer(fresh, [("x", two[0].weight)])
    with pytest.raises(bps_rdma.InvalidArgumentError, match="LBFGS"):
        CrossBarrier(two, torch.optim.LBFGS(two.parameters()))
    with pytest.raises(bps_rdma.InvalidArgumentError, match="strategy"):
        DistributedOptimizer(fresh, strategy="none")
    DistributedOptimizer(fresh)  # what failed left nothing behind


# ---- CrossBarrier


@harness.on_ranks(workers=2)
def test_cross_barrier_updates_just_in_time(bps: Any) -> None:
    """Updates are made in the next forward, module by module; state_dict() and synchronize() make them all."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0), num_steps=3)
    old = [p.detach().clone() for p in model.parameters()]
    model(torch.full((1, 4), float(bps.rank()))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), old, strict=True)), "step() waited"
    model[0](torch.ones(1, 4))
    assert not torch.equal(model[0].weight, old[0])
    assert torch.equal(model[1].weight, old[1])
    optimizer.state_dict()
    assert not torch.equal(model[1].weight, old[1])
    for step in (2, 3):
        model(torch.ones(1, 4)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        changed = not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert changed == (step == 3), "the last step waits, others do not"
        optimizer.zero_grad()


@harness.on_ranks(workers=2)
def test_cross_barrier_tells_of_stale_weights(bps: Any) -> None:
    """A weight that is used outside of its module would be out of date: told in backward."""
    model = nn.Linear(4, 4)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(bps_rdma.BpsError, match=r"outside of the module.*synchronize"):
        nn.functional.linear(torch.ones(1, 4), model.weight).sum().backward()
    bps.barrier()  # what the other rank starts first fails at once when this one has left


@harness.on_ranks(workers=2)
def test_cross_barrier_needs_a_flag_for_unused_parameters(bps: Any) -> None:
    model = training.seeded(training.Branching)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    training.loss_of(model(training.batch(0), 0)).backward()
    with pytest.raises(bps.BpsError, match=r"no gradient to 'odd.weight', 'odd.bias', 'never.weight' and 1 more"):
        optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    model.never.requires_grad_(False)
    never, odd = model.never.weight.clone(), model.odd.weight.clone()
    training.loss_of(model(training.batch(0), 0) + model(training.batch(0), 1)).backward()
    optimizer.step()  # frozen ones need no gradient
    optimizer.synchronize()
    assert torch.equal(model.never.weight, never)
    assert not torch.equal(model.odd.weight, odd)
    optimizer.zero_grad()
    if bps.rank() == 0:
        training.loss_of(model(training.batch(0), 0) + model(training.batch(0), 1)).backward()
    optimizer.step()  # on rank 1 of a loss that does not depend on the model
    optimizer.synchronize()
    assert training.same_everywhere(bps, model)


@harness.on_ranks(workers=1)
def test_lazy_parameters_are_named(bps: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrap in (DistributedOptimizer, DiLoCo, lambda *args: CrossBarrier(model, *args)):
        with pytest.raises(bps.InvalidTensorError, match=r"'1\.weight' has no shape yet"):
            wrap(sgd, model.named_parameters())

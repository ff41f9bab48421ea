# SPDX-License-Identifier: Apache-2.0
"""Parameters that train later than the wrapper was made: averaged where all ranks agree, else an error names one."""

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import training
from strategies import STRATEGIES
from torch import nn

import bps_rdma
from bps_rdma.torch import CrossBarrier, DiLoCo, DistributedDataParallel, DistributedOptimizer


class Growing(nn.Module):
    """A body of which a part is frozen, and a head that scripts replace."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4), in the dtype of the head."""
        x = torch.tanh(self.body(torch.tanh(self.frozen(x.to(self.body.weight.dtype)))))
        return self.head(x.to(next(self.head.parameters()).dtype))


def unfrozen(model: nn.Module) -> list[nn.Parameter]:
    model.frozen.requires_grad_(True)
    return []


def new_head(model: nn.Module) -> list[nn.Parameter]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model.head = nn.Linear(8, 4)
    return list(model.head.parameters())


def new_layer(model: nn.Module) -> list[nn.Parameter]:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model.head = nn.Sequential(model.head, nn.Linear(4, 4))
    return list(model.head[1].parameters())


def only_new(model: nn.Module) -> list[nn.Parameter]:
    """Nothing but what is new is trained from now on."""
    model.requires_grad_(False)
    return new_layer(model)


def wider(model: nn.Module) -> list[nn.Parameter]:
    model.to(torch.float64)
    return []


def assigned(model: nn.Module) -> list[nn.Parameter]:
    model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()}, assign=True)
    model.frozen.requires_grad_(False)
    return list(model.parameters())


def resized(model: nn.Module) -> list[nn.Parameter]:
    """Two classes more, in the parameters that there are."""
    for each in model.head.parameters():
        each.data = torch.cat([each.data, each.data[:2] * 0.5])
    return []


def removed(model: nn.Module) -> list[nn.Parameter]:
    model.body.bias = None
    return []


CHANGES = [unfrozen, new_head, new_layer, only_new, wider, assigned, resized, removed]
Wrap = Callable[[nn.Module], tuple[nn.Module, Any]]


def wraps(bps: Any) -> dict[str, Wrap]:
    def sgd(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def optimizer(strategy: str) -> Wrap:
        return lambda model: (
            model,
            DistributedOptimizer(
                sgd(model), model.named_parameters(), strategy=strategy, bucket_mb=0.0005, find_unused_parameters=True
            ),
        )

    def ddp(strategy: str) -> Wrap:
        return lambda model: (
            DistributedDataParallel(model, strategy=strategy, bucket_mb=0.0005), sgd(model),
        )  # fmt: skip

    kinds: dict[str, Wrap] = {}
    for strategy in STRATEGIES:
        kinds[f"optimizer {strategy}"], kinds[f"ddp {strategy}"] = optimizer(strategy), ddp(strategy)
    for name, options in (("compressed", {"compression": bps_rdma.Int8(feedback=True)}), ("exact", {"exact": True})):
        kinds[name] = lambda model, options=options: (DistributedDataParallel(model, **options), sgd(model))
    late = lambda model: (model, CrossBarrier(model, sgd(model), find_unused_parameters=True))  # noqa: E731
    return {**kinds, "cross barrier": late}


@harness.on_ranks(workers=2)
def test_parameters_that_train_later_are_averaged(bps: Any) -> None:
    for name, wrap in wraps(bps).items():
        for change in CHANGES:
            alone, model = training.seeded(Growing), training.seeded(Growing)
            wrapped, optimizer = wrap(model)
            reference: Any = torch.optim.SGD(alone.parameters(), lr=0.1)
            for step in range(6):
                if step == 3:
                    optimizer.synchronize() if name == "cross barrier" else None
                    for m, o in ((alone, reference), (model, optimizer)):
                        o.zero_grad()
                        new = change(m)
                        if new:
                            o.add_param_group({"params": new})
                for m, o, x in (
                    (alone, reference, training.batch(step)), (wrapped, optimizer, training.share_of(bps, step)),
                ):  # fmt: skip
                    o.zero_grad()
                    training.loss_of(m(x)).backward()
                    if name != "cross barrier":
                        nn.utils.clip_grad_norm_(m.parameters(), 0.3)
                    o.step()
            optimizer.synchronize() if name == "cross barrier" else None
            limit = 0.05 if name == "cross barrier" else 1e-5  # which does not clip
            assert training.distance(alone, model) < limit, (name, change.__name__)
            assert training.same_everywhere(bps, model), (name, change.__name__)


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": "60"})
def test_a_parameter_that_trains_on_one_rank_only(bps: Any) -> None:
    """One rank alone: all ranks raise an error at once, far below the deadline of an operation, that names one."""
    for name, wrap in wraps(bps).items():
        for change in (unfrozen, new_layer, wider, resized):
            model = training.seeded(Growing)
            wrapped, optimizer = wrap(model)

            def steps(count: int, wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
                for _ in range(count):
                    training.make_step(wrapped, optimizer, training.batch(0))

            steps(1)
            optimizer.synchronize() if name == "cross barrier" else None
            if bps.rank() == 1:
                optimizer.zero_grad()
                new = change(model)
                if new:
                    optimizer.add_param_group({"params": new})
            with pytest.raises(bps_rdma.MismatchError, match=r"not on all ranks: .*(\w+\.(weight|bias)|parameter \d) "):
                steps(2)  # CrossBarrier waits for the means of a step in the next one
            # torch takes no other shape while anything holds a graph, as that of the error.
            if name != "cross barrier" and change is not resized:
                if bps.rank() == 0:  # mended: it goes on
                    new = change(model)
                    if new:
                        optimizer.add_param_group({"params": new})
                steps(2)
                assert training.same_everywhere(bps, model), (name, change.__name__)
            bps.barrier()


@harness.on_ranks(workers=2)
def test_another_shape_where_micro_batches_are_added_exactly(bps: Any) -> None:
    model = training.seeded(Growing)
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), exact=True, backward_passes_per_step=2
    )
    for step in range(4):
        if step == 2:
            resized(model)
        optimizer.zero_grad()
        for _ in range(2):
            training.loss_of(model(training.batch(step, *training.share(bps.rank(), 2)))).backward()
        optimizer.step()
    assert model.head.bias.grad is not None
    assert len(model.head.bias.grad) == len(model.head.bias)
    assert training.same_everywhere(bps, model)


@harness.on_ranks(workers=2)
def test_sums_stay_exact_after_another_shape_for_a_while(bps: Any) -> None:
    layer = nn.Linear(64, 1, bias=False)
    model = DistributedDataParallel(layer, exact=True)
    weight, shape, x = layer.weight, (1, 64), torch.ones(64)
    terms = (2.0**24, 1.0, 1.0, 1.0, 1.0)  # rounded after each one, they are 2**24
    for step in range(4):
        weight.grad = None
        if step == 2:
            weight.data = weight.data.view(64)
            model(x)
            weight.data = weight.data.view(shape)
        with model.no_sync():
            for term in terms[:-1]:
                model(x * term).sum().backward()
        model(x * terms[-1]).sum().backward()
        assert weight.grad is not None
        assert weight.grad.eq(sum(terms)).all(), step


@harness.on_ranks(workers=2)
def test_new_parameters_with_other_values(bps: Any) -> None:
    """A new head that each rank has filled by itself: their mean gradients would not make them the same."""
    for name, wrap in wraps(bps).items():
        model = training.seeded(Growing)
        wrapped, optimizer = wrap(model)
        torch.manual_seed(bps.rank())
        model.head = nn.Linear(8, 4)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        with pytest.raises(bps_rdma.MismatchError, match=r"(head\.(weight|bias)|parameter \d).*values"):
            training.loss_of(wrapped(training.batch(0))).backward()
        bps.barrier()
        assert name


@harness.on_ranks(workers=2)
def test_parts_that_are_trained_by_turns(bps: Any) -> None:
    """Parts that are trained by turns, and frozen for a look at the inputs: nothing new is agreed on in each step."""
    model = training.seeded(Growing)
    ddp = DistributedDataParallel(model, strategy="overlap")
    counts = []
    for step in range(6):
        model.frozen.requires_grad_(step % 2 == 1)
        model.body.requires_grad_(step % 2 == 0)
        ddp.zero_grad()
        before = bps.metrics()["total"]["operations"]
        training.loss_of(ddp(training.batch(bps.rank()))).backward()
        counts.append(bps.metrics()["total"]["operations"] - before)
        trained, other = (model.frozen, model.body) if step % 2 else (model.body, model.frozen)
        assert trained.weight.grad is not None
        assert other.weight.grad is None
    assert counts[1] > counts[2] == counts[4] == counts[3] == counts[5]


def alone(bps: Any) -> None:
    """Optimizers whose ranks train by themselves for a while refuse what they would not bring together."""
    for change in (unfrozen, new_layer):
        for kind in (DiLoCo, DistributedOptimizer):
            model = training.seeded(Growing)
            optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            new = change(model)
            if new:
                (optimizer.inner if kind is DiLoCo else optimizer).add_param_group({"params": new})
            training.loss_of(model(training.batch(0))).backward()
            with pytest.raises(bps_rdma.InvalidArgumentError, match=r"(frozen.weight|parameter \d).* is trained"):
                optimizer.step()
    for change, told in (
        (wider, "'body.weight' is float64 .* was float32"),
        (resized, r"'head.weight' is float32 .6, 8. .* was float32 .4, 8."),
    ):
        for kind in (DiLoCo, DistributedOptimizer):
            model = training.seeded(Growing)
            optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            change(model)
            training.loss_of(model(training.batch(0))).backward()
            with pytest.raises(bps_rdma.InvalidArgumentError, match=told):
                optimizer.step()


def test_optimizers_that_meet_by_parameters():
    harness.run(alone, workers=2, env={"BPS_ASYNC": "1"})

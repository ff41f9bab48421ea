# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: every strategy trains as one process would on the whole batch."""

import time
from typing import Any

import harness
import pytest
import torch
import training
from strategies import every_strategy, train, with_every_strategy
from torch import nn

from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer

# ---- Parity


@pytest.mark.parametrize("workers", [1, 3, *(pytest.param(workers, marks=pytest.mark.long) for workers in (2, 4))])
@every_strategy("workers")
def test_weights_are_those_of_one_process(bps: Any, strategy: str) -> None:
    for make in (training.Plain, training.Images):
        if make is training.Images and bps.size() > 1:
            continue  # batch normalisation sees other batches than a single process does
        for set_to_none in (True, False):
            alone, model = training.seeded(make), training.seeded(make, bps.rank())
            ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
            training.train_alone(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), 8)
            adam = torch.optim.AdamW(ddp.parameters(), lr=0.01)
            for step in range(8):
                adam.zero_grad(set_to_none=set_to_none)
                training.loss_of(ddp(training.share_of(bps, step))).backward()
                adam.step()
            assert training.same_everywhere(bps, model)
            assert training.distance(alone, model) < 1e-6


@every_strategy(workers=2)
def test_bf16_weights_are_those_of_one_process_within_their_precision(bps: Any, strategy: str) -> None:
    """A hundredth or so of the way apart; without synchronisation it is a third.

    Plain descent in large steps: one of AdamW's is as long for a wrong gradient, and hardly longer than a rounding.
    """
    start, alone, model = (training.seeded(training.Plain).to(torch.bfloat16) for _ in range(3))
    descent = torch.optim.SGD(alone.parameters(), lr=0.3)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.3)
    for step in range(8):
        for wrapped, optimizer, batch in (
            (alone, descent, training.batch(step)), (ddp, sgd, training.share_of(bps, step)),
        ):  # fmt: skip
            training.make_step(wrapped, optimizer, batch.to(torch.bfloat16))
    assert training.same_everywhere(bps, model)
    moved = training.distance(alone, start)
    assert moved > 0.3
    assert training.distance(alone, model) < moved / 20


def exact(bps: Any, strategy: str) -> None:
    alone, model = training.Exact(), training.Exact()
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.01)
    training.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.5), 6)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.5), bps, 6)
    assert training.distance(alone, model) == 0


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_weights_are_exact_where_sums_are(workers):
    harness.run(with_every_strategy, exact, workers=workers)


def test_dedicated_servers():
    harness.run(with_every_strategy, exact, workers=2, servers=2, env={"BPS_TRANSPORT": "tcp"})


# ---- Gradient accumulation


@pytest.mark.parametrize("set_to_none", [True, False])
@every_strategy(workers=2)
def test_no_sync_accumulates(bps: Any, strategy: str, set_to_none: bool) -> None:
    alone, model = training.seeded(training.Plain), training.seeded(training.Plain)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
    sgd_alone, sgd = torch.optim.SGD(alone.parameters(), lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(0, 12, 3):
        sgd_alone.zero_grad()
        sgd.zero_grad(set_to_none=set_to_none)
        for micro in range(3):
            training.loss_of(alone(training.batch(step + micro))).backward()
        before = bps.metrics()["total"]["operations"]
        with ddp.no_sync():
            for micro in range(2):
                training.loss_of(ddp(training.share_of(bps, step + micro))).backward()
        assert bps.metrics()["total"]["operations"] == before, "no_sync() sent something"
        training.loss_of(ddp(training.share_of(bps, step + 2))).backward()
        sgd_alone.step()
        sgd.step()
    assert training.distance(alone, model) < 1e-6


# ---- Parameters that are not used


@pytest.mark.parametrize("choose", ["by rank", "by step"])
@every_strategy(workers=3)
def test_unused_parameters_are_as_in_one_process(bps: Any, strategy: str, choose: str) -> None:
    """Ranks take different branches; weight decay shows who was thought to have a gradient."""
    rank, size = bps.rank(), bps.size()
    alone, model = training.seeded(training.Branching), training.seeded(training.Branching)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.0005, find_unused_parameters=True)
    adam_alone, adam = (torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (alone, ddp))
    for step in range(6):
        taken = [(other + step) % 2 if choose == "by rank" else step % 2 for other in range(size)]
        adam_alone.zero_grad()
        shares = [training.batch(step, *training.share(other, size)) for other in range(size)]
        losses = [training.loss_of(alone(x, branch)) for x, branch in zip(shares, taken, strict=True)]
        (sum(losses) / size).backward()  # type: ignore[union-attr]
        adam_alone.step()
        adam.zero_grad()
        training.loss_of(ddp(shares[rank], taken[rank])).backward()
        assert model.never.weight.grad is None, "a parameter that no rank used has a gradient"
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
        adam.step()
        assert training.distance(alone, model) < 1e-5


@every_strategy(workers=2)
def test_a_pass_that_uses_some_parameters_needs_a_flag_without_buckets(bps: Any, strategy: str) -> None:
    """Without the flag, as in torch; buckets need none. Of both wrappers."""
    model, plain = training.seeded(training.Branching), training.seeded(training.Branching)
    ddp = DistributedDataParallel(model, strategy=strategy)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(sgd, plain.named_parameters(), strategy=strategy)
    for net, inner in ((ddp, model), (plain, plain)):
        if strategy in ("flat", "bucketed"):
            net(training.batch(0), 0).sum().backward()
            assert inner.never.weight.grad is None
            continue
        with pytest.raises(bps.BpsError, match=r"no gradient to 'odd.weight', 'odd.bias', 'never.weight' and 1 more"):
            net(training.batch(0), 0).sum().backward()
    optimizer.zero_grad()
    plain = training.seeded(training.Branching)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    DistributedOptimizer(sgd, plain.named_parameters(), strategy=strategy, find_unused_parameters=True)
    plain(training.batch(0), 0).sum().backward()
    assert plain.never.weight.grad is None
    if strategy in ("flat", "bucketed"):
        return
    ddp.zero_grad()
    model.never.requires_grad_(False)
    training.loss_of(ddp(training.batch(0), 0) + ddp(training.batch(0), 1)).backward()  # frozen ones need no gradient
    assert model.never.weight.grad is None
    mean = model.odd.weight.grad.clone()
    ddp.zero_grad()
    output = ddp(training.batch(0), 0) + ddp(training.batch(0), 1)
    if bps.rank() == 0:
        training.loss_of(output).backward()
    else:  # has a loss that does not depend on the model
        ddp.finish_gradient_synchronization()
    torch.testing.assert_close(model.odd.weight.grad, mean / bps.size())


# ---- What is copied, and when things are sent


@harness.on_ranks(workers=2)
def test_gradients_stay_in_their_buckets(bps: Any) -> None:
    model = training.Exact()
    ddp = DistributedDataParallel(model, strategy="bucketed", bucket_mb=0.02)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.5)
    train(ddp, sgd, bps, 3)
    places = [p.grad.data_ptr() for p in model.parameters()]
    before = bps.metrics()["total"]
    train(ddp, sgd, bps, 2, set_to_none=False)
    after = bps.metrics()["total"]
    assert places == [p.grad.data_ptr() for p in model.parameters()], "gradients left their buckets"
    assert after["copies"] == before["copies"]
    assert after["operations"] - before["operations"] == 2 * len(ddp.synchronizer.units)
    assert len(ddp.synchronizer.units) > 1


class Marked(nn.Module):
    """Notes how many operations are over when the gradient of the first layer's output comes, and that of the last's.

    In between, backward waits until `least` of them are.
    """

    def __init__(self, bps: Any, least: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))
        self.bps = bps
        self.least = least
        self.sent: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 256) makes the same."""
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number in (0, len(self.layers) - 1):
                x.register_hook(self.note)
        return x

    def over(self) -> int:
        """Operations that are over."""
        return int(self.bps.metrics()["total"]["operations"])

    def note(self, _: torch.Tensor) -> None:
        """The hook."""
        if self.sent:
            time.sleep(0.02)  # what must not happen has had the time to
            harness.eventually(lambda: self.over() >= self.sent[0] + self.least, what="operations during backward")
        self.sent.append(self.over())


# Of eleven layers' two parameters each, or of six buckets; "naive" and "flat" send nothing before backward is over.
DURING_BACKWARD = {"naive": 0, "flat": 0, "overlap": 12, "bucketed": 3}


@every_strategy(workers=2)
def test_eager_strategies_send_during_backward(bps: Any, strategy: str) -> None:
    least = DURING_BACKWARD[strategy]
    model = Marked(bps, least)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.5)
    for step in range(4):
        model.sent.clear()
        ddp(torch.ones(4, 256)).sum().backward()
        before, after = model.sent
        assert least > 0 or after == before or step == 0  # the first pass begins with a comparison of values


@harness.on_ranks(workers=2)
def test_buckets_follow_the_order_of_the_gradients(bps: Any) -> None:
    """Buckets are rebuilt in the order in which gradients came, which is not that of registration here."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)))

    ddp = DistributedDataParallel(Odd(), strategy="bucketed", bucket_mb=0.0003)

    def names() -> list[str]:
        return [entry.name for unit in ddp.synchronizer.units for entry in unit.entries]

    assert names() == ["c.weight", "a.weight", "b.weight"]
    for _ in range(3):
        ddp(torch.ones(2, 8)).sum().backward()
    assert names() == ["c.weight", "b.weight", "a.weight"]
    assert [unit.priority for unit in ddp.synchronizer.units] == [-2, 0, -1]


@every_strategy(workers=3)
def test_mixed_dtypes(bps: Any, strategy: str) -> None:
    """Parameters of several dtypes, each in its own; small ones between large ones."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16] * 3
            self.parts = nn.ParameterList(
                nn.Parameter(torch.ones(3 + 500 * (i % 5), dtype=kind)) for i, kind in enumerate(kinds)
            )

        def forward(self, x: float) -> torch.Tensor:
            return sum((part * x).sum().double() for part in self.parts)  # type: ignore[return-value]

    model = Mixed()
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.004)
    for _ in range(3):
        ddp.zero_grad()
        ddp(float(bps.rank() + 1)).backward()
        for part in model.parts:
            assert part.grad is not None
            assert part.grad.dtype == part.dtype
            assert torch.equal(part.grad, torch.full_like(part, 2.0))

# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: every strategy trains as one process would on the whole batch."""

from __future__ import annotations

import os
import time
from typing import Any

import cluster
import pytest
import torch
import training
from torch import nn
from torch.utils.checkpoint import checkpoint

STRATEGIES = ["naive", "flat", "overlap", "bucketed"]


def with_every_strategy(bps: Any, body: Any, *args: Any) -> list[Any]:
    """One job for all strategies: starting the ranks takes longer than what they do."""
    results = []
    for strategy in STRATEGIES:
        try:
            results.append(body(bps, strategy, *args))
        except Exception as error:
            raise AssertionError(f"strategy {strategy!r}") from error
    return results


def train(ddp: Any, optimizer: Any, bps: Any, steps: int, set_to_none: bool = True) -> None:
    begin, end = training.share(bps.rank(), bps.size())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        training.loss_of(ddp(training.batch(step, begin, end))).backward()
        optimizer.step()


# ---- Parity


def parity(bps: Any, strategy: str) -> float:
    from bps_rdma.torch import DistributedDataParallel

    worst = 0.0
    for make in (training.Plain, training.Images):
        if make is training.Images and bps.size() > 1:
            continue  # batch normalisation sees other batches than a single process does
        for set_to_none in (True, False):
            alone, model = training.seeded(make), training.seeded(make, bps.rank())
            ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
            adam = torch.optim.AdamW(alone.parameters(), lr=0.01)
            for step in range(8):
                adam.zero_grad()
                training.loss_of(alone(training.batch(step))).backward()
                adam.step()
            begin, end = training.share(bps.rank(), bps.size())
            adam = torch.optim.AdamW(ddp.parameters(), lr=0.01)
            for step in range(8):
                adam.zero_grad(set_to_none=set_to_none)
                training.loss_of(ddp(training.batch(step, begin, end))).backward()
                adam.step()
            assert training.same_everywhere(bps, model)
            worst = max(worst, training.distance(alone, model))
    return worst


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_weights_are_those_of_one_process(workers):
    for worst in cluster.run(with_every_strategy, parity, workers=workers):
        assert max(worst) < 1e-6


def bf16(bps: Any, strategy: str) -> tuple[float, float]:
    """How far the weights end from those of one process, and how far they have come.

    Plain descent in large steps: one of AdamW's is as long for a wrong gradient, and hardly longer than a rounding.
    """
    from bps_rdma.torch import DistributedDataParallel

    start, alone, model = (training.seeded(training.Plain).to(torch.bfloat16) for _ in range(3))
    descent = torch.optim.SGD(alone.parameters(), lr=0.3)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.3)
    begin, end = training.share(bps.rank(), bps.size())
    for step in range(8):
        for wrapped, optimizer, batch in (
            (alone, descent, training.batch(step)), (ddp, sgd, training.batch(step, begin, end)),
        ):  # fmt: skip
            optimizer.zero_grad()
            training.loss_of(wrapped(batch.to(torch.bfloat16))).backward()
            optimizer.step()
    assert training.same_everywhere(bps, model)
    return training.distance(alone, model), training.distance(alone, start)


def test_bf16_weights_are_those_of_one_process_within_their_precision():
    """A hundredth or so of the way; without synchronisation it is a third."""
    for found in cluster.run(with_every_strategy, bf16, workers=2):
        for apart, moved in found:
            assert moved > 0.3
            assert apart < moved / 20


def exact(bps: Any, strategy: str) -> None:
    from bps_rdma.torch import DistributedDataParallel

    alone, model = training.Exact(), training.Exact()
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.01)
    training.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.5), 6)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.5), bps, 6)
    assert training.distance(alone, model) == 0


@pytest.mark.parametrize("workers", [2, 4])
def test_weights_are_exact_where_sums_are(workers):
    cluster.run(with_every_strategy, exact, workers=workers)


def test_dedicated_servers():
    cluster.run(with_every_strategy, exact, workers=2, servers=2, env={"BPS_TRANSPORT": "tcp"})


# ---- Gradient accumulation


def accumulation(bps: Any, strategy: str, set_to_none: bool) -> None:
    from bps_rdma.torch import DistributedDataParallel

    alone, model = training.seeded(training.Plain), training.seeded(training.Plain)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
    sgd_alone, sgd = torch.optim.SGD(alone.parameters(), lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1)
    begin, end = training.share(bps.rank(), bps.size())
    for step in range(0, 12, 3):
        sgd_alone.zero_grad()
        sgd.zero_grad(set_to_none=set_to_none)
        for micro in range(3):
            training.loss_of(alone(training.batch(step + micro))).backward()
        before = bps.metrics()["total"]["operations"]
        with ddp.no_sync():
            for micro in range(2):
                training.loss_of(ddp(training.batch(step + micro, begin, end))).backward()
        assert bps.metrics()["total"]["operations"] == before, "no_sync() sent something"
        training.loss_of(ddp(training.batch(step + 2, begin, end))).backward()
        sgd_alone.step()
        sgd.step()
    assert training.distance(alone, model) < 1e-6


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates(set_to_none):
    cluster.run(with_every_strategy, accumulation, set_to_none, workers=2)


# ---- Parameters that are not used


def branches(bps: Any, strategy: str, choose: str) -> None:
    """Ranks take different branches; weight decay shows who was thought to have a gradient."""
    from bps_rdma.torch import DistributedDataParallel

    rank, size = bps.rank(), bps.size()
    alone, model = training.seeded(training.Branching), training.seeded(training.Branching)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.0005)
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


@pytest.mark.parametrize("choose", ["by rank", "by step"])
def test_unused_parameters_are_as_in_one_process(choose):
    cluster.run(with_every_strategy, branches, choose, workers=3)


# ---- What is copied, and when things are sent


def views(bps: Any) -> None:
    from bps_rdma.torch import DistributedDataParallel

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


def test_gradients_stay_in_their_buckets():
    cluster.run(views, workers=2)


class Marked(nn.Module):
    """Notes, at the gradient of each layer, how many operations are over; backward lingers so that they can be."""

    def __init__(self, bps: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))
        self.bps = bps
        self.sent: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 256) makes the same."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(self.note)
        return x

    def note(self, _: torch.Tensor) -> None:
        """The hook."""
        time.sleep(0.02)
        self.sent.append(self.bps.metrics()["total"]["operations"])


def overlap(bps: Any, strategy: str) -> list[int]:
    from bps_rdma.torch import DistributedDataParallel

    model = Marked(bps)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.5)
    for _ in range(3):
        model.sent.clear()
        ddp(torch.ones(4, 256)).sum().backward()
    return model.sent


def test_eager_strategies_send_during_backward():
    for of_rank in cluster.run(with_every_strategy, overlap, workers=2):
        during = {strategy: sent[-1] - sent[0] for strategy, sent in zip(STRATEGIES, of_rank, strict=True)}
        assert during["naive"] == during["flat"] == 0
        assert during["overlap"] > during["bucketed"] > 0


def order(bps: Any) -> None:
    """Buckets are rebuilt in the order in which gradients came, which is not that of registration here."""
    from bps_rdma.torch import DistributedDataParallel

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)))

    ddp = DistributedDataParallel(Odd(), strategy="bucketed", bucket_mb=0.0003)

    def names() -> list[str]:
        return [place.name for unit in ddp.synchronizer.units for place in unit.places]

    assert names() == ["c.weight", "a.weight", "b.weight"]
    for _ in range(3):
        ddp(torch.ones(2, 8)).sum().backward()
    assert names() == ["c.weight", "b.weight", "a.weight"]
    assert [unit.priority for unit in ddp.synchronizer.units] == [-2, 0, -1]


def test_buckets_follow_the_order_of_the_gradients():
    cluster.run(order, workers=2)


def mixed(bps: Any, strategy: str) -> None:
    """Parameters of several dtypes, each in its own; small ones between large ones."""
    from bps_rdma.torch import DistributedDataParallel

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


def test_mixed_dtypes():
    cluster.run(with_every_strategy, mixed, workers=3)


# ---- Backward in odd ways


def checkpointed(bps: Any, strategy: str, reentrant: bool) -> None:
    from bps_rdma.torch import DistributedDataParallel

    class Saving(training.Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            x = checkpoint(lambda y: torch.tanh(self.frozen(torch.relu(y))), x, use_reentrant=reentrant)
            x = checkpoint(lambda y: self.norm(self.again(torch.tanh(self.tied(y)))), x, use_reentrant=reentrant)
            return self.last(x)

    alone, model = training.seeded(training.Plain), training.seeded(Saving)
    ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001)
    sgd_alone, sgd = torch.optim.SGD(alone.parameters(), lr=0.1), torch.optim.SGD(ddp.parameters(), lr=0.1)
    begin, end = training.share(bps.rank(), bps.size())
    for step in range(4):
        sgd_alone.zero_grad()
        sgd.zero_grad()
        training.loss_of(alone(training.batch(step))).backward()
        training.loss_of(ddp(training.batch(step, begin, end).requires_grad_())).backward()
        sgd_alone.step()
        sgd.step()
    assert training.distance(alone, model) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations(reentrant):
    cluster.run(with_every_strategy, checkpointed, reentrant, workers=2)


def twice(bps: Any) -> None:
    """A layer in two checkpoints of the old kind gets its gradient in two parts."""
    import bps_rdma
    from bps_rdma.torch import DistributedDataParallel

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


def test_a_gradient_in_two_parts():
    cluster.run(twice, workers=2)


def several_losses(bps: Any) -> None:
    """Two backwards after one forward, and an output that is a nest."""
    from bps_rdma.torch import DistributedDataParallel

    class Nest(training.Plain):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"a": out.sum(), "b": [out.pow(2).mean()]}

    ddp = DistributedDataParallel(training.seeded(Nest), bucket_mb=0.001)
    alone = training.seeded(Nest)
    begin, end = training.share(bps.rank(), bps.size())
    for step in range(3):
        whole = alone(training.batch(step))
        (whole["a"] / bps.size()).backward(retain_graph=True)
        whole["b"][0].backward()
        mine = ddp(training.batch(step, begin, end))
        mine["a"].backward(retain_graph=True)
        mine["b"][0].backward()
    for a, b in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.allclose(a.grad, b.grad, atol=1e-4)


def test_several_backwards_after_one_forward():
    cluster.run(several_losses, workers=2)


def no_gradient_here(bps: Any, strategy: str) -> None:
    """On one rank the loss does not depend on any parameter."""
    from bps_rdma.torch import DistributedDataParallel

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


def test_a_rank_without_gradients():
    cluster.run(with_every_strategy, no_gradient_here, workers=2)


def failing_backward(bps: Any) -> None:
    """What was raised in backward is raised; the next forward says what is to be done."""
    import bps_rdma
    from bps_rdma.torch import DistributedDataParallel

    model = training.seeded(training.Plain)
    ddp = DistributedDataParallel(model, bucket_mb=0.001)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    for _ in range(2):
        hook = model.first.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            ddp(torch.ones(2, 8)).sum().backward()
        hook.remove()
        with pytest.raises(bps_rdma.BpsError, match="finish_gradient_synchronization"):
            ddp(torch.ones(2, 8))
        ddp.finish_gradient_synchronization()
        ddp.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        assert model.first.weight.grad is not None


def test_a_backward_that_fails():
    cluster.run(failing_backward, workers=2)


# ---- Buffers, wrappers, arguments


def buffers(bps: Any) -> None:
    from bps_rdma.torch import DistributedDataParallel

    for spread in (True, False):
        model = training.seeded(training.Images, bps.rank())
        ddp = DistributedDataParallel(model, broadcast_buffers=spread)
        for step in range(3):
            ddp(training.batch(step + 10 * bps.rank())).sum().backward()
        ddp(training.batch(0))
        mean = model.norm.running_mean
        # The last batch was the same on all ranks, so the means are, when the ones before it were.
        of_root = bps.broadcast(mean.clone(), 0, f"check {spread}")
        assert torch.equal(mean, of_root) == (spread or bps.rank() == 0)
        assert model.norm.num_batches_tracked == 4
        ddp.eval()
        before = bps.metrics()["total"]["operations"]
        with torch.no_grad():
            ddp(training.batch(0))  # ranks may evaluate by themselves
        assert bps.metrics()["total"]["operations"] == before


def test_buffers_of_the_first_rank_are_spread():
    cluster.run(buffers, workers=2)


def equal_buffers(bps: Any) -> list[float]:
    from bps_rdma.torch import DistributedDataParallel

    class Counting(nn.Module):
        def __init__(self, seen: float) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("seen", torch.tensor([seen]))
            self.register_buffer("small", torch.tensor(7, dtype=torch.int16))
            self.register_buffer("fleeting", torch.tensor([seen]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.seen.mean() * self.fleeting.mean()

    model = Counting(float(bps.rank() + 1))
    ddp = DistributedDataParallel(model)
    first = model.seen.item(), model.fleeting.item()
    model.seen += bps.rank()
    ddp(torch.ones(1, 2))
    return [*first, model.seen.item()]


def test_buffers_of_every_kind():
    assert cluster.run(equal_buffers, workers=3) == [[1.0, 1.0, 1.0]] * 3


def rewrapped(bps: Any) -> None:
    """A module that gets another wrapper is not synchronised twice."""
    from bps_rdma.torch import DistributedDataParallel

    model = training.Exact()
    for strategy in STRATEGIES * 2:
        ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.01)
        before = bps.metrics()["total"]["operations"]
        ddp(training.batch(0)).sum().backward()
        flags = 0 if strategy in ("flat", "bucketed") else 1
        assert bps.metrics()["total"]["operations"] - before == len(ddp.synchronizer.units) + flags
        del ddp


def test_a_module_can_be_wrapped_again():
    cluster.run(rewrapped, workers=2)


def over_gloo(bps: Any) -> None:
    """As course work has it: a gloo group on some port, a wrapped module, a sharded optimizer, and nothing else."""
    import torch.distributed as dist

    from bps_rdma.torch import DistributedDataParallel, ShardedOptimizer

    rank, size, port = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    alone, model = training.seeded(training.Plain), training.seeded(training.Plain, rank)
    ddp = DistributedDataParallel(model)
    adam_alone = torch.optim.AdamW(alone.parameters(), lr=0.01)
    adam = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    begin, end = training.share(rank, size)
    for step in range(5):
        adam_alone.zero_grad()
        adam.zero_grad()
        training.loss_of(alone(training.batch(step))).backward()
        training.loss_of(ddp(training.batch(step, begin, end))).backward()
        ddp.finish_gradient_synchronization()
        adam_alone.step()
        adam.step()
    assert training.distance(alone, model) < 1e-6
    for value in ddp.module.state_dict().values():
        everybody = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(everybody, value)
        assert all(torch.equal(value, other) for other in everybody)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [2, 3])
def test_inside_a_gloo_group(workers):
    cluster.run(over_gloo, workers=workers, init=False)


def over_a_group(bps: Any) -> None:
    """Halves of the world train models of their own."""
    from bps_rdma.torch import DistributedDataParallel

    ranks = [0, 1] if bps.rank() < 2 else [2, 3]
    group = bps.new_group(ranks)
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, bps.rank())
    ddp = DistributedDataParallel(model, group=group)
    assert torch.equal(model.weight, torch.full((1, 4), float(ranks[0])))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((1, 4), float(bps.rank()))).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((1, 4), sum(ranks) / 2))


def test_groups():
    cluster.run(over_a_group, workers=4)


def compressed(bps: Any, strategy: str) -> None:
    from bps_rdma.torch import Compression, DistributedDataParallel

    for compression, dtype in ((Compression.bf16, torch.bfloat16), (Compression.fp16, torch.float16)):
        model = nn.Linear(64, 64)
        ddp = DistributedDataParallel(model, strategy=strategy, compression=compression)
        torch.manual_seed(bps.rank())
        for _ in range(2):
            ddp.zero_grad()
            x = torch.randn(4, 64)
            ddp(x).sum().backward()
            everybody = bps.all_gather(x.sum(0))
            expected = everybody.view(bps.size(), 64).to(dtype).float().mean(0).to(dtype).float()
            assert model.weight.grad.dtype == torch.float32
            assert torch.equal(model.weight.grad, expected.expand(64, 64))


def test_compressed_gradients():
    cluster.run(with_every_strategy, compressed, workers=2)


def wrong(bps: Any) -> None:
    import bps_rdma
    from bps_rdma.torch import DistributedDataParallel

    with pytest.raises(bps_rdma.InvalidArgumentError, match="naive, flat, overlap, bucketed"):
        DistributedDataParallel(nn.Linear(2, 2), strategy="best")
    with pytest.raises(bps_rdma.InvalidTensorError, match=r"'weight' has dtype torch.complex64"):
        DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(bps_rdma.InvalidTensorError, match="meta"):
        DistributedDataParallel(nn.Linear(2, 2, device="meta"))
    for strategy in STRATEGIES:
        ddp = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), strategy=strategy)
        with pytest.raises(bps_rdma.InvalidTensorError, match=r"'weight' is sparse.*sparse=False"):
            ddp(torch.tensor([1])).sum().backward()


def test_wrong_arguments():
    cluster.run(wrong, workers=1)

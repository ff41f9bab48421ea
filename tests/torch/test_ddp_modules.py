# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: buffers, modules within modules, groups, and wrong arguments."""

import contextlib
import os
from typing import Any

import harness
import pytest
import torch
import training
from strategies import STRATEGIES, every_strategy
from torch import nn

import bps_rdma
from bps_rdma.torch import BFloat16, DistributedDataParallel, DistributedOptimizer, Float16, ShardedOptimizer


@harness.on_ranks(workers=2)
def test_buffers_of_the_first_rank_are_spread(bps: Any) -> None:
    for spread in (True, False):
        model = training.seeded(training.Images, bps.rank())
        ddp = DistributedDataParallel(model, broadcast_buffers=spread)
        for step in range(3):
            ddp(training.batch(step + 10 * bps.rank())).sum().backward()
        ddp(training.batch(0))
        mean = model.norm.running_mean.cpu()
        # The last batch was the same on all ranks, so the means are, when the ones before it were.
        of_root = bps.broadcast(mean.clone(), 0, f"check {spread}")
        assert torch.equal(mean, of_root) == (spread or bps.rank() == 0)
        assert model.norm.num_batches_tracked == 4
        ddp.eval()
        before = bps.metrics()["total"]["operations"]
        with torch.no_grad():
            ddp(training.batch(0))  # ranks may evaluate by themselves
        assert bps.metrics()["total"]["operations"] == before


@every_strategy(workers=2)
def test_two_wrappers_of_one_parameter(bps: Any, strategy: str) -> None:
    """Both would average its gradient where it lies: that is refused, unless one does so after the other."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    layer = nn.Linear(8, 4)
    inner = DistributedDataParallel(layer, strategy=strategy)
    ddp = DistributedDataParallel(Outer(inner), strategy=strategy)
    if strategy == "naive":
        ddp(torch.full((2, 8), float(bps.rank()))).sum().backward()
        assert torch.equal(layer.weight.grad, torch.full((4, 8), bps.size() - 1.0))
        return
    with pytest.raises(bps_rdma.BpsError, match=r"(weight|bias)' .*averaged.*not both"):
        ddp(torch.full((2, 8), float(bps.rank()))).sum().backward()


@every_strategy(workers=2)
def test_a_wrapped_model_with_a_wrapped_optimizer(bps: Any, strategy: str) -> None:
    """It is refused where both would average a gradient at the same time."""
    refused = []
    for other in STRATEGIES:
        ddp = DistributedDataParallel(nn.Linear(8, 4), strategy=strategy)
        optimizer = DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), strategy=other)
        output = ddp(torch.full((2, 8), float(bps.rank())))
        try:
            output.sum().backward()
        except bps_rdma.BpsError as error:
            refused.append(str(error))
            for wrapper in (ddp, optimizer):
                with contextlib.suppress(bps_rdma.BpsError):
                    wrapper.synchronize()
        else:
            assert torch.equal(ddp.module.weight.grad, torch.full((4, 8), bps.size() - 1.0)), other
    assert len(refused) >= 2
    assert all("averaged" in each and "not both" in each for each in refused)


@harness.on_ranks(workers=3)
def test_buffers_of_every_kind(bps: Any) -> None:
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
    assert model.seen.item() == model.fleeting.item() == 1
    model.seen += bps.rank()
    ddp(torch.ones(1, 2))
    assert model.seen.item() == 1


@harness.on_ranks(workers=2)
def test_two_forwards_before_one_backward(bps: Any) -> None:
    """A critic sees two batches, and Siamese views of one, before one backward; statistics are those of rank 0."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale

    alone, model = training.seeded(Views), training.seeded(Views)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        per_rank = [training.batch(10 * step + rank) for rank in range(bps.size())]
        alone.zero_grad()
        start = {name: value.clone() for name, value in alone.named_buffers()}
        for rank in reversed(range(bps.size())):  # rank 0 last: its statistics stay
            alone.load_state_dict(start, strict=False)
            one = alone(per_rank[rank])
            ((one - alone(per_rank[rank] + 1).detach()).square().mean() / bps.size()).backward()
        ddp.zero_grad()
        x = per_rank[bps.rank()]
        (ddp(x) - ddp(x + 1).detach()).square().mean().backward()
        assert all(
            torch.allclose(mine.grad, theirs.grad, atol=1e-5)
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True)
        )
        ddp.zero_grad()
        (ddp(x) + ddp(x + 1)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        ddp.load_state_dict({f"module.{name}": value for name, value in alone.named_buffers()}, strict=False)


@harness.on_ranks(workers=2)
def test_a_module_can_be_wrapped_again(bps: Any) -> None:
    """A module that gets another wrapper is not synchronised twice."""
    model = training.Exact()
    compared = 3  # operations by which the first pass of a wrapper compares parameters and their values
    for strategy in STRATEGIES * 2:
        ddp = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.01, find_unused_parameters=True)
        before = bps.metrics()["total"]["operations"]
        ddp(training.batch(0)).sum().backward()
        flags = 0 if strategy in ("flat", "bucketed") else 1
        assert bps.metrics()["total"]["operations"] - before == len(ddp.synchronizer.units) + flags + compared
        del ddp


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
@harness.on_ranks("workers", init=False)
def test_inside_a_gloo_group(bps: Any) -> None:
    """As course work has it: a gloo group on some port, a wrapped module, a sharded optimizer, and nothing else."""
    import torch.distributed as dist

    rank, size, port = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    alone, model = training.seeded(training.Plain), training.seeded(training.Plain, rank)
    ddp = DistributedDataParallel(model)
    adam_alone = torch.optim.AdamW(alone.parameters(), lr=0.01)
    adam = ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    begin, end = training.share(rank, size)
    for step in range(5):
        training.make_step(alone, adam_alone, training.batch(step))
        adam.zero_grad()
        training.loss_of(ddp(training.batch(step, begin, end))).backward()
        ddp.finish_gradient_synchronization()
        adam.step()
    assert training.distance(alone, model) < 1e-6
    for value in ddp.module.state_dict().values():
        everybody = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(everybody, value)
        assert all(torch.equal(value, other) for other in everybody)
    dist.barrier()


@harness.on_ranks(workers=4)
def test_groups(bps: Any) -> None:
    """Halves of the world train models of their own."""
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


@every_strategy(workers=2, env={"BPS_MIN_COMPRESS_BYTES": "64"})
def test_compressed_gradients(bps: Any, strategy: str) -> None:
    for compression, dtype in ((BFloat16(everywhere=True), torch.bfloat16), (Float16(everywhere=True), torch.float16)):
        model = nn.Linear(64, 64)
        ddp = DistributedDataParallel(model, strategy=strategy, compression=compression)
        torch.manual_seed(bps.rank())
        for _ in range(2):
            ddp.zero_grad()
            x = torch.randint(-50, 50, (4, 64)).float()  # sums of which are exact in any order
            ddp(x).sum().backward()
            everybody = bps.all_gather(x.sum(0).cpu())
            expected = everybody.view(bps.size(), 64).to(dtype).float().mean(0).to(dtype).float()
            assert model.weight.grad.dtype == torch.float32
            assert torch.equal(model.weight.grad.cpu(), expected.expand(64, 64))


class Looking(nn.Module):
    """Has a sparse gradient, without a layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


@harness.on_ranks(workers=1)
def test_wrong_arguments(bps: Any) -> None:
    with pytest.raises(bps_rdma.InvalidArgumentError, match="naive, flat, overlap, bucketed"):
        DistributedDataParallel(nn.Linear(2, 2), strategy="best")
    with pytest.raises(bps_rdma.InvalidTensorError, match=r"'weight' has dtype torch.float8_e5m2"):
        DistributedDataParallel(nn.Linear(2, 2).to(torch.float8_e5m2))
    with pytest.raises(bps_rdma.InvalidArgumentError, match="several devices"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    with pytest.raises(bps_rdma.InvalidTensorError, match="meta"):
        DistributedDataParallel(nn.Linear(2, 2, device="meta"))
    mixed = nn.Linear(2, 2).bfloat16()
    if hasattr(mixed.bias, "grad_dtype"):  # from torch 2.10 on
        for kind in (torch.float32, None):  # None: any
            mixed.bias.grad_dtype = kind
            with pytest.raises(bps_rdma.InvalidTensorError, match=r"'bias' is torch.bfloat16 .* grad_dtype"):
                DistributedDataParallel(mixed)
    for strategy in STRATEGIES:
        ddp = DistributedDataParallel(Looking(), strategy=strategy)
        with pytest.raises(bps_rdma.InvalidTensorError, match=r"'weight' is sparse.*sparse=False"):
            ddp(torch.tensor([1])).sum().backward()


class Cache(torch.nn.Module):
    """Keeps a table that grows with what it has seen, as layers of attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.ones(len(x))
        return self.scale * x * self.table[: len(x)]


@harness.on_ranks(workers=2, init=False)
def test_buffers_that_grow_on_one_rank_alone_are_a_mismatch(bps: Any) -> None:
    """All have grown together before."""
    model = DistributedDataParallel(Cache())
    for length in (3, 8):
        model(torch.ones(length)).sum().backward()
    model(torch.ones(8 + bps.rank())).sum().backward()
    with pytest.raises(bps.MismatchError) as caught:
        model(torch.ones(3))
    assert caught.value.message.endswith("worker 0 has 1 of 8 elements together, worker 1 has 1 of 9")
    assert "broadcast_buffers=False" in caught.value.hint
    bps.shutdown(timeout=0)


@harness.on_ranks(workers=2)
def test_a_module_whose_parts_have_another_order_is_a_mismatch(bps: Any) -> None:
    names = ["a", "b"] if bps.rank() == 0 else ["b", "a"]  # as from a set of names
    for make in (lambda: torch.nn.Linear(4, 4, bias=False), lambda: torch.nn.BatchNorm1d(4, affine=False)):
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4)})
        for name in names:
            model.add_module(name, make())
        with pytest.raises(bps.MismatchError, match=r"worker 0 has a\.\w+ where worker 1 has b\."):
            DistributedDataParallel(model)


@every_strategy(workers=2)
def test_a_module_that_the_script_replaces(bps: Any, strategy: str) -> None:
    """The new one is trained as the old one was, also on a rank that has no batch then."""
    alone = training.seeded(training.Plain)
    ddp = DistributedDataParallel(training.Images(), strategy=strategy, find_unused_parameters=True)
    ddp(training.batch(bps.rank())).sum().backward()
    ddp.module = training.seeded(training.Plain)
    for step in range(2):
        for model in (ddp, alone):
            model.zero_grad()
        (training.loss_of(alone(training.batch(step))) / bps.size()).backward()
        if bps.rank() == 0:
            training.loss_of(ddp(training.batch(step))).backward()
        else:
            ddp.finish_gradient_synchronization()
        for mine, theirs in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            assert mine.grad is theirs.grad is None or torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    ddp.module = nn.Linear(8, 4)
    nn.init.constant_(ddp.module.weight, bps.rank())
    with pytest.raises(bps.MismatchError, match=r"weight .*values.*broadcast_parameters"):
        ddp(training.batch(0)).sum().backward()


@every_strategy(workers=2)
def test_a_scripted_module(bps: Any, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), torch.jit.script(nn.Linear(4, 4)))
    for ddp in (DistributedDataParallel(each, strategy=strategy) for each in (model, torch.jit.script(model))):
        ddp(torch.full((2, 8), float(bps.rank()))).sum().backward()
        assert torch.equal(ddp.module[1].bias.grad, torch.full((4,), 2.0))
        ddp.zero_grad()

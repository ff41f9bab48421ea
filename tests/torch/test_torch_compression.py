# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients in the torch face: every strategy, flags of unused parameters, and what training reaches."""

import functools
import warnings
from typing import Any

import harness
import pytest
import torch
from strategies import every_strategy, with_every_strategy
from torch import nn

import bps_rdma.torch
from bps_rdma import BFloat16, Compression, Int4, Int8, MxFp8, OneBit, TopK
from bps_rdma.errors import InvalidTensorError
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer, broadcast_parameters, push_pull

TCP = {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "1024"}


@every_strategy(workers=2, env=TCP)
def test_gradients_are_averaged(bps: Any, strategy: str) -> None:
    model = nn.Linear(200, 100)
    ddp = DistributedDataParallel(model, strategy=strategy, compression=Int8(feedback=True))
    torch.manual_seed(bps.rank())
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(4, 200)
        (ddp(x) * 1e-3).sum().backward()
        exact = bps.all_gather(x.sum(0) * 1e-3).view(bps.size(), 200).mean(0).expand(100, 200)
        got = model.weight.grad
        assert (got - exact).abs().max() < 3 * exact.abs().max() / 127, step
        # The bias is small, and travels as it is: its block is not mixed with flags or other gradients' blocks.
        assert torch.allclose(model.bias.grad, torch.full((100,), 4e-3), rtol=0.02)
        everybody = bps.all_gather(got.flatten()).view(bps.size(), -1)
        assert (everybody == everybody[0]).all()
    assert bps.metrics()["total"]["compressed_bytes"] > 0


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return 3 * self.used(x) + (self.sometimes(x) if both else 0)


@every_strategy(workers=2, env=TCP)
def test_unused_parameters_are_told_from_others(bps: Any, strategy: str) -> None:
    model = Branches()
    ddp = DistributedDataParallel(
        model, strategy=strategy, compression=TopK(k=0.01, feedback=True), find_unused_parameters=True
    )
    ddp(torch.ones(1, 64), bps.rank() == 0).sum().backward()
    assert model.never.weight.grad is None
    assert model.sometimes.weight.grad is not None, "rank 0 has used it"
    assert model.used.weight.grad.abs().sum() > 0


def loss_of(bps: Any, compression: Any) -> float:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))
    broadcast_parameters(model.state_dict(), root_rank=0)
    options = {} if compression is None else {"compression": compression}
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), named_parameters=model.named_parameters(), **options
    )
    generator = torch.Generator().manual_seed(bps.rank())
    for _ in range(300):
        x = torch.randn(32, 32, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), teacher(x).detach()).backward()
        optimizer.step()
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(7))
    everybody = bps.all_gather(torch.cat([one.detach().flatten() for one in model.parameters()])).view(bps.size(), -1)
    assert (everybody == everybody[0]).all(), "replicas drift apart"
    return float(nn.functional.mse_loss(model(x), teacher(x)))


@functools.cache
def plain_losses() -> list[float]:
    """Of the same training without compression."""
    return harness.run(loss_of, None, workers=2, env=TCP)


@pytest.mark.parametrize(
    "compression",
    [
        TopK(k=0.1, feedback=True),
        *(pytest.param(how, marks=pytest.mark.long) for how in (Int8(), MxFp8(), Int4(feedback=True), BFloat16())),
    ],
    ids=lambda how: how.text,
)
def test_training_reaches_about_the_same_loss(compression: Compression) -> None:
    plain = plain_losses()
    compressed = harness.run(loss_of, compression, workers=2, env=TCP)
    untrained = 0.2  # a model that says zero
    assert plain[0] < untrained / 20
    assert compressed[0] == compressed[1]
    assert compressed[0] < plain[0] + untrained / 100, (plain, compressed)


@harness.on_ranks(workers=2, env=TCP)
def test_operations_take_methods(bps: Any) -> None:
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(bps.rank()), requires_grad=True)
    mean = push_pull(tensor, name="t", compression=Int8())
    exact = bps.all_gather(tensor.detach()).view(bps.size(), -1).mean(0)
    assert 0 < (mean - exact).abs().max() < 0.05
    mean.sum().backward()
    assert torch.equal(tensor.grad, torch.ones(4096))
    byteps = {"byteps_compressor_type": "onebit", "byteps_error_feedback_type": "vanilla"}
    push_pull(tensor.detach(), name="o", compression=byteps)
    with pytest.raises(bps.InvalidArgumentError, match="no compression method"):
        push_pull(tensor, name="x", compression="zip")
    with pytest.raises(bps.InvalidArgumentError, match="says nothing of how"):
        push_pull(tensor, name="x", compression=3)
    bps.barrier()


def in_other_orders(bps: Any) -> None:
    """Operations refuse tensors that do not lie in one piece, and touch nothing; gradients may lie as they like."""
    rows = torch.randn(600, 400)
    forms = [rows.t(), rows[::2, 1::3], torch.randn(1, 400).expand(300, 400)]
    for number, tensor in enumerate(forms):
        before = tensor.clone()
        for method in (Int8(), TopK(k=0.1), Int4(feedback=True)):
            with pytest.raises(InvalidTensorError, match="not contiguous"):
                bps_rdma.torch.push_pull(tensor, name=f"{number} {method}", compression=method)
            with pytest.raises(InvalidTensorError, match="not contiguous"):
                bps.push_pull_inplace(tensor.numpy(), name=f"{number} {method} numpy", compression=method)
        assert torch.equal(tensor, before)


def channels_last(bps: Any, strategy: str) -> None:
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(5)
        model = nn.Conv2d(16, 32, 3).to(memory_format=order)
        ddp = DistributedDataParallel(model, strategy=strategy, compression=Int8())
        torch.manual_seed(bps.rank())
        (ddp(torch.randn(2, 16, 8, 8)) * 1e-3).square().sum().backward()
        everybody = bps.all_gather(model.weight.grad.contiguous().flatten()).view(bps.size(), -1)
        assert torch.equal(everybody[0], everybody[1])
        found.append(model.weight.grad)
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    # Blocks of a code hold other elements together, but no value is farther off than a step of its block.
    assert (found[0] - found[1]).abs().max() < 3 * found[0].abs().max() / 127
    assert bps.metrics()["total"]["compressed_bytes"] > 0


def test_tensors_that_are_not_contiguous() -> None:
    harness.run(in_other_orders, workers=2, env=TCP)
    harness.run(with_every_strategy, channels_last, workers=2, env=TCP)


@harness.on_ranks(workers=1)
def test_texts_warn_where_they_stand(bps: Any) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, tensor = nn.Linear(4, 4), torch.ones(4)
    calls = [
        lambda how: push_pull(tensor, "a", compression=how),
        lambda how: bps_rdma.torch.prepare("push_pull", tensor, "a", compression=how),
        lambda how: bps_rdma.torch.declare("b", tensor, compression=how),
        lambda how: bps_rdma.torch.push_pull_many([tensor], "c", compression=how),
        lambda how: bps_rdma.torch.HookState(compression=how),
        lambda how: bps_rdma.torch.DiLoCo(optimizer(), compression=how),
        lambda how: DistributedOptimizer(optimizer(), model.named_parameters(), compression=how),
        lambda how: bps_rdma.torch.CrossBarrier(model, optimizer(), compression=how),
        lambda how: DistributedDataParallel(model, compression=how)(tensor).sum().backward(),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            call("int8:feedback=1")
        found = [one for one in told if one.category is DeprecationWarning]
        assert [(one.filename, one.lineno) for one in found] == [(__file__, call.__code__.co_firstlineno)]
        assert "bps_rdma.Int8(feedback=True)" in str(found[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            call(Int8(feedback=True))


@harness.on_ranks(workers=2, env={"BPS_MIN_COMPRESS_BYTES": "0"})
def test_an_infinity_ends_with_its_pass(bps: Any) -> None:
    """A loss scaler skips that step. A bucket has gaps between its parameters, which are sent in blocks with these."""
    for compression in (Int8(everywhere=True), Int8(feedback=True, everywhere=True), OneBit(everywhere=True)):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)), compression=compression)
        for step in range(4):
            model.zero_grad()
            loss = model(torch.ones(2, 8)).sum()
            (loss * torch.inf if step == 1 and bps.rank() == 1 else loss).backward()
            finite = all(each.grad.isfinite().all() for each in model.parameters())
            assert finite == (step != 1), (compression, step)

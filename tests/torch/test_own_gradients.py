# SPDX-License-Identifier: Apache-2.0
"""Scripts that look at gradients through tensors of their own, taken once: means get there, as with torch's DDP."""

import contextlib
from collections.abc import Callable
from typing import Any

import harness
import pytest
import simulated
import torch
import training
from strategies import STRATEGIES
from torch import nn
from wraps import plain
from wraps import wraps as all_wraps

from bps_rdma.torch import Compression, CrossBarrier, DistributedDataParallel, holders

Held = list[torch.Tensor]


def wraps(bps: Any, **options: Any) -> dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]]:
    """All of them, and DistributedDataParallel with every strategy."""

    def ddp(strategy: Any) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
        def wrap(model: nn.Module) -> tuple[nn.Module, Any]:
            wrapped = DistributedDataParallel(model, strategy=strategy, bucket_mb=0.001, **options)
            return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)

        return wrap

    found = {f"ddp {strategy}": ddp(strategy) for strategy in STRATEGIES}
    return found if options else {**all_wraps(bps), **found}


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def in_one_buffer(model: nn.Module) -> Held:
    flat = torch.zeros(sum(each.numel() for each in trained_of(model)))
    begin = 0
    for each in trained_of(model):
        each.grad = flat[begin : begin + each.numel()].view_as(each)
        begin += each.numel()
    return [flat]


def in_own_tensors(model: nn.Module) -> Held:
    for each in trained_of(model):
        each.grad = torch.zeros_like(each)
    return [each.grad for each in trained_of(model) if each.grad is not None]


def some_only(model: nn.Module) -> Held:
    """Of the others, the gradients are found anew in each step."""
    each = trained_of(model)[-1]
    each.grad = torch.zeros_like(each)
    return [each.grad]


def of_the_first_step(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], Held]:
    def take(model: nn.Module) -> Held:
        return [make(each.grad) for each in trained_of(model) if each.grad is not None]

    return take


HOLDS = [
    in_one_buffer,
    in_own_tensors,
    some_only,
    of_the_first_step(lambda grad: grad),
    of_the_first_step(lambda grad: grad.view(-1)),
    of_the_first_step(lambda grad: grad.detach()),
]


def train(
    model: nn.Module, optimizer: Any, samples: Callable[[int], torch.Tensor], hold: Any, micro: int, no_sync: Any
) -> None:
    """Zeroes and scales gradients through what it holds, from the second step on."""
    held: Held = []
    for step in range(4):
        if step == 1:
            held = hold(model.module if hasattr(model, "module") else model)
        optimizer.zero_grad(set_to_none=False)
        for each in held:
            each.zero_()
        for number in range(micro):
            with no_sync() if number < micro - 1 else contextlib.nullcontext():
                training.loss_of(model(samples(step * micro + number))).backward()
        if held:
            norm = torch.stack([each.norm() for each in held]).norm()
            for each in held:
                each.mul_(0.3 / norm)
        optimizer.step()


def compare(bps: Any, which: dict[str, Any], micro: int = 1, tolerance: float = 1e-5) -> None:
    for number, hold in enumerate(HOLDS):
        alone = training.seeded(training.Plain)
        train(*plain(alone), training.batch, hold, micro, contextlib.nullcontext)
        for name, wrap in which.items():
            model = training.seeded(training.Plain)
            wrapped, optimizer = wrap(model)
            if micro > 1 and wrapped is model:
                optimizer.set_backward_passes_per_step(micro)
            no_sync = getattr(wrapped, "no_sync", contextlib.nullcontext)
            train(wrapped, optimizer, lambda step: training.share_of(bps, step), hold, micro, no_sync)
            assert training.distance(alone, model) < tolerance, (number, name)
            assert training.same_everywhere(bps, model), (number, name)


def seen(bps: Any) -> None:
    compare(bps, wraps(bps))


def accumulated(bps: Any) -> None:
    compare(bps, wraps(bps), micro=2)


def exactly(bps: Any) -> None:
    compare(bps, wraps(bps, exact=True))
    compare(bps, wraps(bps, exact=True), micro=2)


def on_a_device(bps: Any) -> None:
    simulated.install(immediate=True)
    accumulated(bps)


def with_an_old_torch(bps: Any) -> None:
    """Built for CPUs alone, it does not tell how many tensors share memory."""
    holders.CAN_TELL = False
    seen(bps)


# What an old torch does not tell is left out for kept gradients, too (test_kept_gradients.py).
@pytest.mark.parametrize(
    "body", [seen, accumulated, exactly, on_a_device, pytest.param(with_an_old_torch, marks=pytest.mark.long)]
)
def test_means_get_to_tensors_of_the_script(body):
    harness.run(body, workers=2)


@harness.on_ranks(
    workers=2,
    env={"BPS_MIN_COMPRESS_BYTES": "64", "BPS_TRANSPORT": "tcp"},
    rank_env=[{"BPS_HOST_ID": f"host {rank}"} for rank in range(2)],
)
def test_compressed_means_get_to_tensors_of_the_script(bps: Any) -> None:
    compare(bps, wraps(bps, compression=Compression.fp16), tolerance=1e-2)


@harness.on_ranks(workers=2)
def test_cross_barrier_refuses_tensors_of_the_script(bps: Any) -> None:
    """It averages in place, while a script would use its buffer."""
    for hold in (in_one_buffer, in_own_tensors):
        model = training.seeded(training.Plain)
        optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        held = hold(model)
        with pytest.raises(bps.BpsError, match=r"gradient of '.*' lies in memory that the script holds"):
            training.loss_of(model(training.batch(0))).backward()
        optimizer.zero_grad()
        for step in range(2):
            training.loss_of(model(training.batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert held


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return self.last(self.embedding((x * 1000).long() % 16).mean(1))


@harness.on_ranks(workers=2)
def test_sparse_means_get_to_tensors_of_the_script(bps: Any) -> None:
    """A sparse gradient that is added to a dense one makes a dense one."""
    cut = training.share(bps.rank(), bps.size())
    for hold in (in_one_buffer, in_own_tensors, lambda _: []):
        models = training.seeded(Shared), training.seeded(Shared)
        for model, wrapped, part in ((models[0], models[0], ()), (models[1], DistributedDataParallel(models[1]), cut)):
            held: Held = hold(model)
            for step in range(3):
                training.loss_of(wrapped(training.batch(step)[slice(*part or (None,))])).backward()
                if step == 0 and not held:
                    held = [each.grad for each in model.parameters() if each.grad is not None]
                with torch.no_grad():
                    for each, grad in zip(model.parameters(), held if len(held) > 1 else [], strict=False):
                        each.sub_(grad.to_dense(), alpha=0.1)
                    if len(held) == 1:
                        flat = torch.cat([each.view(-1) for each in model.parameters()]) - 0.1 * held[0]
                        nn.utils.vector_to_parameters(flat, model.parameters())
                for each in held:
                    each.zero_()
        assert training.distance(*models) < 1e-5, hold

# SPDX-License-Identifier: Apache-2.0
"""Gradients that are read or changed between backward() and step(): they are means, or an error names the parameter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import pytest
import simulated
import torch
import training
from strategies import STRATEGIES
from torch import nn
from torch.utils.checkpoint import checkpoint
from wraps import plain, wraps

import bps_rdma
from bps_rdma.torch import Compression, CrossBarrier, DiLoCo, DistributedDataParallel, DistributedOptimizer

# ---- The recipes of torch.amp


def scaled(model: nn.Module, optimizer: Any, shares: Callable[[int], list[torch.Tensor]], clips: bool) -> list[float]:
    """Trains as torch's recipe has it; the scale after each step. Step 3 has an infinity in the last share."""
    scaler = torch.amp.GradScaler(training.DEVICE, init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(8):
        for x in shares(step):
            loss = training.loss_of(model(x))
        optimizer.zero_grad() if step % 2 else model.zero_grad()
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def samples(step: int, begin: int = 0, end: int = training.SAMPLES) -> torch.Tensor:
    whole = training.batch(step)
    if step in (3, 4):
        whole[-1] = torch.inf
    return whole[begin:end]


def mixed_precision(bps: Any) -> None:
    begin, end = training.share(bps.rank(), bps.size())
    for clips in (True, False):
        alone, reference = plain(training.seeded(training.Plain))
        expected = scaled(alone, reference, lambda step: [samples(step)], clips)
        assert len(set(expected)) > 2
        for name, wrap in wraps(bps).items():
            model = training.seeded(training.Plain)
            wrapped, optimizer = wrap(model)
            found = scaled(wrapped, optimizer, lambda step: [samples(step, begin, end)], clips)
            assert found == expected, name
            assert training.distance(alone, model) < 1e-5, name
            assert training.same_everywhere(bps, model), name


def test_mixed_precision_as_torch_has_it():
    harness.run(mixed_precision, workers=2)


def test_mixed_precision_in_a_job_that_may_lose_ranks():
    harness.run(mixed_precision, workers=2, env={"BPS_MIN_WORKERS": "1"})


def compressed(bps: Any) -> None:
    """An infinity on one rank reaches all of them, as such or as NaN, whatever the code: they skip the same step."""
    begin, end = training.share(bps.rank(), bps.size())
    for method in (
        bps.Int8(feedback=True),
        bps.Int4(),
        bps.OneBit(),
        bps.TopK(k=0.1),
        Compression.fp16,
        Compression.bf16,
    ):
        for through_optimizer in (True, False):
            model = training.seeded(training.Plain)
            wrapped: nn.Module = model
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
            if through_optimizer:
                optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression=method)
            else:
                wrapped = DistributedDataParallel(model, compression=method)
            scales = scaled(wrapped, optimizer, lambda step: [samples(step, begin, end)], True)
            assert scales[3] < scales[2], method
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            assert training.same_everywhere(bps, model), method


def test_mixed_precision_with_compressed_gradients():
    env = {"BPS_MIN_COMPRESS_BYTES": "64", "BPS_TRANSPORT": "tcp"}
    each = [{"BPS_HOST_ID": f"host {rank}"} for rank in range(2)]
    harness.run(compressed, workers=2, env=env, rank_env=each)


@harness.on_ranks(workers=2)
def test_mixed_precision_with_diloco(bps: Any) -> None:
    """A rank that skips a step has made it as far as the others are concerned."""
    begin, end = training.share(bps.rank(), bps.size())
    model = training.seeded(training.Plain)
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    scales = scaled(model, optimizer, lambda step: [samples(step, begin, end)], True)
    assert (scales[3] < scales[2]) == (bps.rank() == 1)
    assert optimizer.steps == 8
    assert training.same_everywhere(bps, model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# ---- Changes by hand


def by_norm(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def divided(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(3)


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def norm(model: nn.Module) -> Any:
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


TOUCHES = [by_norm, by_value, divided, replaced, norm]


@harness.on_ranks(workers=2)
def test_gradients_are_means_when_backward_returns(bps: Any) -> None:
    for name, wrap in wraps(bps).items():
        for touch in TOUCHES:
            alone, reference = plain(training.seeded(training.Plain))
            model = training.seeded(training.Plain)
            wrapped, optimizer = wrap(model)
            for step in range(4):
                reference.zero_grad()
                training.loss_of(alone(training.batch(step))).backward()
                expected = touch(alone)
                reference.step()
                optimizer.zero_grad()
                training.loss_of(wrapped(training.share_of(bps, step))).backward()
                found = touch(model)
                optimizer.step()
                if expected is not None:
                    assert torch.allclose(found, expected, atol=1e-5), (name, touch.__name__)
            assert training.distance(alone, model) < 1e-5, (name, touch.__name__)


@harness.on_ranks(workers=2)
def test_a_model_in_checkpoints(bps: Any) -> None:
    """Every parameter gets its gradient in a backward inside of another one, which is over later."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def both(y: torch.Tensor) -> torch.Tensor:
                return torch.tanh(self.outer(checkpoint(self.inner, y, use_reentrant=True)))

            return checkpoint(both, torch.tanh(checkpoint(both, x, use_reentrant=True)), use_reentrant=True)

    alone, model = training.seeded(Nested), training.seeded(Nested)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = DistributedOptimizer(mine, model.named_parameters(), strategy="flat")  # gradients come in two parts
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        norms = []
        for m, o, x in ((alone, reference, training.batch(step)), (model, mine, training.share_of(bps, step))):
            o.zero_grad()
            training.loss_of(m(x.requires_grad_())).backward()
            norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            o.step()
        assert torch.allclose(*norms, atol=1e-6)
    assert training.distance(alone, model) < 1e-6


@harness.on_ranks(workers=2)
def test_backward_passes_that_nobody_announced(bps: Any) -> None:
    """Several backward passes without a word about it, losses one after the other, and a GAN's two optimizers."""
    begin, end = training.share(bps.rank(), bps.size())
    for strategy in STRATEGIES:
        ones = [training.seeded(training.Plain) for _ in range(2)]
        alone, (mine, reference) = ones[0], [torch.optim.SGD(m.parameters(), lr=0.1) for m in reversed(ones)]
        mine = DistributedOptimizer(mine, ones[1].named_parameters(), strategy=strategy, bucket_mb=0.001)
        for step in range(0, 9, 3):
            norms = []
            for m, o, cut in ((alone, reference, (0, training.SAMPLES)), (ones[1], mine, (begin, end))):
                o.zero_grad()
                for micro in range(2):
                    training.loss_of(m(training.batch(step + micro, *cut))).backward()
                out = m(training.batch(step + 2, *cut))
                training.loss_of(out).backward(retain_graph=True)
                out.square().mean().backward()
                norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.5))
                o.step()
            assert torch.allclose(*norms, atol=1e-5)
        assert training.distance(alone, ones[1]) < 1e-5


@harness.on_ranks(workers=2)
def test_two_models_against_each_other(bps: Any) -> None:
    begin, end = training.share(bps.rank(), bps.size())

    def train(generator: Any, critic: Any, optimizers: Any, cut: tuple[int, int]) -> None:
        first, second = optimizers
        for step in range(4):
            x = training.batch(step, *cut)
            second.zero_grad()
            (training.loss_of(critic(x)) + training.loss_of(critic(generator(x).detach()))).backward()
            second.step()
            training.make_step(critic, first, generator(x))

    def models() -> list[nn.Module]:
        return [
            training.seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())),
            training.seeded(lambda: nn.Sequential(nn.BatchNorm1d(8, momentum=0.5), nn.Linear(8, 1), nn.Tanh())),
        ]

    def descent(both: Any) -> list[Any]:
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in both]

    for kind in ("optimizer", "ddp"):
        mine, alone = models(), models()
        for m in (mine[1], alone[1]):
            m[0].eval() if kind == "optimizer" else None  # statistics of a batch are others on each rank
        if kind == "optimizer":
            optimizers = [
                DistributedOptimizer(o, m.named_parameters()) for o, m in zip(descent(mine), mine, strict=True)
            ]
            train(*mine, optimizers, (begin, end))
            train(*alone, descent(alone), (0, training.SAMPLES))
            for a, b in zip(mine, alone, strict=True):
                assert training.distance(a, b) < 1e-6
        else:
            wrapped = [DistributedDataParallel(m) for m in mine]
            train(*wrapped, descent(wrapped), (begin, end))
        for m in mine:
            assert training.same_everywhere(bps, m)


# ---- What cannot be shown


@harness.on_ranks(workers=2)
def test_cross_barrier_refuses_to_show_gradients(bps: Any) -> None:
    model = training.seeded(training.Plain)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler(training.DEVICE)

    def unscaled(_: nn.Module) -> None:
        scaler.unscale_(optimizer)

    def stepped(_: nn.Module) -> None:
        scaler.step(optimizer)

    for touch in (*TOUCHES, unscaled, stepped):
        optimizer.zero_grad()
        scaler.scale(training.loss_of(model(training.batch(0)))).backward()
        with pytest.raises(bps_rdma.BpsError, match=r"gradient of '\w+\.(weight|bias)' .*DistributedOptimizer"):
            touch(model)
        with pytest.raises(bps_rdma.BpsError, match=r"zero_grad.* between backward\(\) and step"):
            optimizer.zero_grad()
        with pytest.raises(bps_rdma.BpsError, match=r"'last.bias' got a gradient again before step"):
            training.loss_of(model(training.batch(0))).backward()
        optimizer.step()
    out = training.loss_of(model(training.batch(0)))
    with pytest.raises(bps_rdma.BpsError, match=r"gradient of 'last.bias' .*zero_grad\(\) between step"):
        out.backward()
    optimizer.zero_grad()
    training.loss_of(model(training.batch(0))).backward()
    model.zero_grad()
    with pytest.raises(bps_rdma.BpsError, match="gradient of"):
        optimizer.step()
    bps.barrier()  # what the other rank starts fails when this one has left


def in_backward(bps: Any) -> None:
    """A hook of a user that changes a gradient after it was sent: the mean would be wrong, and on this rank only."""

    def half(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def other(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad.clone()

    for change in (half, other):
        for strategy in ("overlap", "bucketed"):
            for kind in (DistributedDataParallel, DistributedOptimizer):
                model = nn.Linear(8, 4, bias=False)
                if kind is DistributedDataParallel:
                    wrapped = kind(model, strategy=strategy)
                else:
                    kept = kind(torch.optim.SGD(model.parameters()), model.named_parameters(), strategy=strategy)
                    assert kept is not None
                    wrapped = model
                model.weight.register_post_accumulate_grad_hook(change)
                with pytest.raises(bps_rdma.BpsError, match=r"'weight'.* was changed"):
                    wrapped(torch.ones(1, 8)).sum().backward()


def on_a_device(bps: Any) -> None:
    simulated.install(immediate=True)
    in_backward(bps)


@pytest.mark.parametrize("body", [in_backward, on_a_device])
def test_a_hook_that_changes_what_was_sent(body):
    harness.run(body, workers=2)


def halve(part: torch.Tensor, _: torch.Tensor) -> None:
    part.mul_(0.5)


PARTS = {"views": torch.Tensor.view_as, "data": lambda part, like: part.view_as(like).data,
         "detached": lambda part, like: part.view_as(like).detach()}  # fmt: skip


@pytest.mark.parametrize("made", PARTS)
@harness.on_ranks(workers=2)
def test_a_hook_that_changes_a_part_of_a_buffer(bps: Any, made: str) -> None:
    """A part of the script's own buffer is changed after it was sent: all ranks have the mean of what was sent."""
    from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer

    part_of = PARTS[made]
    for strategy in ("overlap", "bucketed"):
        for kind in (DistributedDataParallel, DistributedOptimizer):
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
            nn.init.ones_(model[0].weight)
            flat = torch.zeros(64 + 32)
            first, last = (each.weight for each in model)
            first.grad, last.grad = part_of(flat[:64], first), part_of(flat[64:], last)
            if kind is DistributedDataParallel:
                wrapped = kind(model, strategy=strategy, bucket_mb=0.0001)
            else:
                kept = kind(torch.optim.SGD(model.parameters()), model.named_parameters(), strategy=strategy)
                assert kept is not None
                wrapped = model
            first.register_post_accumulate_grad_hook(partial(halve, flat[64:]))
            wrapped(torch.full((1, 8), 1.0 + bps.rank())).sum().backward()
            assert flat[64:].tolist() in ([12.0] * 32, [6.0] * 32), "the mean, or a half that was sent by all ranks"
            mean = bps.push_pull(flat.numpy().copy(), name="all alike")
            assert (torch.from_numpy(mean) == flat).all(), "ranks differ"


def clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(max=1.0)


class Joined(nn.Module):
    """autograd gives both parameters parts of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.ones(4, 8)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ torch.cat([self.query, self.key]).T


@harness.on_ranks(workers=2)
def test_a_hook_that_clamps_gradients_which_autograd_has_made_as_parts(bps: Any) -> None:
    from bps_rdma.torch import DistributedDataParallel

    for strategy in ("overlap", "naive"):
        inner = Joined()
        model = DistributedDataParallel(inner, strategy=strategy)
        for parameter in inner.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)
        for _ in range(2):
            inner.zero_grad()
            model(torch.full((1, 8), 0.5 + bps.rank())).sum().backward()
            for parameter in inner.parameters():
                assert parameter.grad is not None
                assert parameter.grad.unique().item() in (1.0, 0.75), "the mean of what was sent: clamped or not"

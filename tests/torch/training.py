# SPDX-License-Identifier: Apache-2.0
"""Small models and the training of them that tests compare: by several ranks, and by one process on the whole batch."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

DEVICE = os.environ.get("BPS_TEST_DEVICE", "cpu")  # of the tests that name none: see ci/steps/gpu
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
SAMPLES = 12  # of a batch: divides by 1, 2, 3 and 4 ranks


class Plain(nn.Module):
    """Several layers, among them a frozen one and two that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(16, 16, bias=False)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.tied.weight
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        x = torch.tanh(self.frozen(torch.relu(self.first(x))))
        return self.last(self.norm(self.again(torch.tanh(self.tied(x)))))


class Branching(nn.Module):
    """Uses other layers for odd samples than for even ones, and one layer for none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.even = nn.Linear(8, 4)
        self.odd = nn.Linear(8, 4)
        self.never = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return (self.odd if branch else self.even)(torch.tanh(self.body(x)))


class Exact(nn.Module):
    """Linear in every weight, on small integers: all sums are exact in float32, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((n,), 1.0)) for n in (8, 3000, 8, 70_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n,)."""
        return sum((w[:8] * x + w[-8:] * x.flip(1)).sum(1) for w in self.weights)  # type: ignore[return-value]


class Images(nn.Module):
    """Convolutions in another memory format, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        x = x.repeat(1, 4).view(-1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.last(torch.relu(self.norm(self.convolution(x))).mean((2, 3)))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with random weights of this seed, the same ones on every device."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = make()
    return model.to(torch.get_default_device())


def batch(step: int, begin: int = 0, end: int = SAMPLES) -> torch.Tensor:
    """Samples [begin, end) of the batch of a step: small integers, (n, 8)."""
    generator = torch.Generator().manual_seed(100 + step)
    samples = torch.randint(-3, 4, (SAMPLES, 8), generator=generator, device="cpu").float()
    return samples[begin:end].to(torch.get_default_device())


def share(rank: int, size: int) -> tuple[int, int]:
    """Which samples of a batch a rank works on."""
    return rank * SAMPLES // size, (rank + 1) * SAMPLES // size


def share_of(bps: Any, step: int) -> torch.Tensor:
    """The samples of the batch of a step on which this rank works."""
    return batch(step, *share(bps.rank(), bps.size()))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Mean over ranks gives that of the batch. Of (n,): three times the mean, exact where n is three times 2^k."""
    return output.sum() / (len(output) / 3) if output.dim() == 1 else (output - 1).pow(2).mean()


def make_step(model: nn.Module, optimizer: Any, x: torch.Tensor, *more: Any) -> None:
    """Trains on samples, as the loop of a tutorial does; more: what the model takes beside them."""
    optimizer.zero_grad()
    loss_of(model(x, *more)).backward()
    optimizer.step()


def train_alone(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Trains in one process, on whole batches."""
    for step in range(steps):
        make_step(model, optimizer, batch(step))


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between parameters of two models."""
    return max(
        (a.float() - b.float()).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def same_everywhere(bps: Any, model: nn.Module) -> bool:
    """Whether all ranks have the same bits in all parameters."""
    flat = torch.cat([p.detach().cpu().reshape(-1).float() for p in model.parameters()]).view(torch.int32)
    lowest, highest = bps.push_pull(flat, op="min"), bps.push_pull(flat, op="max")
    return bool(torch.equal(lowest, highest))


def fail(_: torch.Tensor) -> None:
    """A hook, for a backward that fails."""
    raise ZeroDivisionError("on purpose")


@contextlib.contextmanager
def failing(register: Callable[[Any], Any], hook: Callable[[torch.Tensor], None] = fail) -> Iterator[None]:
    """In this block backward fails in a hook, which `register` takes, such as that of a parameter."""
    handle = register(hook)
    with pytest.raises(ZeroDivisionError):
        yield
    handle.remove()


def outputs_of(model: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    """Those that this model gives from now on."""
    found: list[weakref.ref[torch.Tensor]] = []
    model.register_forward_hook(lambda _, __, output: found.append(weakref.ref(output)))
    return found

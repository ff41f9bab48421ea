# SPDX-License-Identifier: Apache-2.0
"""What training scripts do (habits), and the ways to train on several ranks (wrappers), for test_habits.py."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import training
from torch import nn

import bps_rdma.torch as bps_torch

Step = Callable[["Trained", int], None]
STEPS = 4


class Trained:
    """A model of one rank, wrapped in one way, with its optimizer.

    Attributes:
        model: to call; plain: the module in it.
        no_sync: the context in which gradients are only accumulated.
        passes: backward passes between steps.
    """

    def __init__(self, wrapper: str, plain: nn.Module, group: Any, passes: int, unused: bool) -> None:
        self.plain, self.model, self.passes = plain, plain, passes
        self.no_sync: Callable[[], Any] = contextlib.nullcontext
        make = torch.optim.SparseAdam if isinstance(plain, Words) and plain.only_words else torch.optim.SGD
        options = {"lr": 0.05} if make is torch.optim.SparseAdam else {"lr": 0.05, "momentum": plain_momentum(plain)}
        if wrapper in ("DDP", "ZeRO"):
            self.model = bps_torch.DistributedDataParallel(plain)
        elif wrapper in OPTIMIZERS:
            bps_torch.broadcast_parameters(plain.state_dict())
        else:  # torch's own: gloo, backend, hook
            self.model = nn.parallel.DistributedDataParallel(
                plain, process_group=group if wrapper == "backend" else None, find_unused_parameters=unused
            )
            if wrapper == "hook":
                self.model.register_comm_hook(bps_torch.HookState(), bps_torch.ddp_comm_hook)
        if wrapper == "ZeRO":
            self.optimizer: Any = bps_torch.ShardedOptimizer(plain.parameters(), make, **options)
        else:
            self.optimizer = make(plain.parameters(), **options)
        if wrapper == "DistributedOptimizer":
            sparse = [f"{name}.weight" for name, each in plain.named_modules() if isinstance(each, nn.Embedding)]
            self.optimizer = bps_torch.DistributedOptimizer(
                self.optimizer, plain.named_parameters(), backward_passes_per_step=passes, sparse=sparse
            )
        elif wrapper == "CrossBarrier":
            self.optimizer = bps_torch.CrossBarrier(
                plain, self.optimizer, backward_passes_per_step=passes, find_unused_parameters=unused
            )
        else:
            self.no_sync = self.model.no_sync


def plain_momentum(plain: nn.Module) -> float:
    """Momentum of torch's SGD does not take sparse gradients."""
    return 0.0 if isinstance(plain, Words) else 0.9


class Words(nn.Module):
    """An embedding whose gradient is sparse, alone or before a layer; rank 1 sees few words, and several times."""

    def __init__(self, only_words: bool = False, sparse: bool = True) -> None:
        super().__init__()
        self.only_words = only_words
        self.words = nn.Embedding(50, 4, sparse=sparse)
        self.last = nn.Identity() if only_words else nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return self.last(self.words((x.abs() * 5 + x.sum(1, keepdim=True).abs()).long() % 50).mean(1))


class Waves(nn.Module):
    """A complex parameter between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.turn = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return (self.first(x).to(torch.complex64) @ self.turn + self.shift[:4].to(torch.complex64)).abs()


class Mixed(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.short = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.long = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return self.long(self.short(self.first(x).bfloat16()).double())


class Choosing(training.Branching):
    """Another branch for each rank, and one that no rank uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 8) makes (n, 4)."""
        return super().forward(x, dist.get_rank() % 2)


# ---- Habits: each makes one step


def _share(step: int) -> torch.Tensor:
    return training.batch(step, *training.share(dist.get_rank(), dist.get_world_size()))


def plain_step(it: Trained, step: int) -> None:
    """The loop of a tutorial."""
    it.optimizer.zero_grad()
    training.loss_of(it.model(_share(step))).backward()
    it.optimizer.step()


def kept_gradients(it: Trained, step: int) -> None:
    """Gradients are zeroed, and not dropped."""
    it.optimizer.zero_grad(set_to_none=False)
    training.loss_of(it.model(_share(step))).backward()
    it.optimizer.step()


def clipped(it: Trained, step: int) -> None:
    """Gradients are clipped by their norm."""
    it.optimizer.zero_grad()
    training.loss_of(it.model(_share(step))).backward()
    nn.utils.clip_grad_norm_(it.plain.parameters(), 0.1)
    it.optimizer.step()


def scaled(it: Trained, step: int) -> None:
    """GradScaler and autocast; in one step rank 1 alone has an infinity, and no rank may step."""
    scaler = it.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=256.0))
    it.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
        loss = training.loss_of(it.model(_share(step)).float())
    if step == 2 and dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(it.optimizer)
    nn.utils.clip_grad_norm_(it.plain.parameters(), 1.0)
    scaler.step(it.optimizer)
    scaler.update()


def accumulated(it: Trained, step: int) -> None:
    """Three micro-batches make a step."""
    it.optimizer.zero_grad()
    for micro in range(3):
        with it.no_sync() if micro < 2 else contextlib.nullcontext():
            training.loss_of(it.model(_share(3 * step + micro))).backward()
    it.optimizer.step()


HABITS: dict[str, tuple[Step, Callable[[], nn.Module]]] = {
    "plain": (plain_step, training.Plain),
    "kept gradients": (kept_gradients, training.Plain),
    "clipped": (clipped, training.Plain),
    "scaled": (scaled, training.Plain),
    "accumulated": (accumulated, training.Plain),
    "unused parameters": (plain_step, Choosing),
    "mixed dtypes": (plain_step, Mixed),
    "batch norm": (plain_step, training.Images),
    "complex": (plain_step, Waves),
    "complex accumulated": (accumulated, Waves),
    "sparse": (plain_step, Words),
    "sparse accumulated": (accumulated, Words),
    "sparse alone": (plain_step, lambda: Words(True)),
}
WRAPPERS = ("DDP", "DistributedOptimizer", "CrossBarrier", "hook", "backend", "ZeRO")
OPTIMIZERS = ("DistributedOptimizer", "CrossBarrier")  # the script broadcasts
# CrossBarrier shows gradients to nobody, and sends no rows.
LEFT_OUT = {("CrossBarrier", habit) for habit in HABITS if habit.startswith(("clipped", "scaled", "sparse"))}


def trained(wrapper: str, habit: str, group: Any = None) -> list[torch.Tensor]:
    """Parameters and buffers after some steps. Ranks begin with different ones; those of rank 0 count."""
    step, make = HABITS[habit]
    plain = training.seeded(make, dist.get_rank())
    it = Trained(wrapper, plain, group, 3 if "accumulated" in habit else 1, habit == "unused parameters")
    for number in range(STEPS):
        step(it, number)
    if wrapper == "CrossBarrier":
        it.optimizer.synchronize()
    return [each.detach().clone() for each in plain.parameters()]

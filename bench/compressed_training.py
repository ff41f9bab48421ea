# SPDX-License-Identifier: Apache-2.0
"""Losses of small models with compressed gradients: a character GPT on this project's own pages, and a convolution net.

    BPS_TRANSPORT=tcp BPS_MIN_COMPRESS_BYTES=1024 bps run -np 2 --servers 1 \\
        python bench/compressed_training.py --seeds 1,2,3 --plot docs/compression_loss.png
    ... python bench/compressed_training.py --optimizer sgd --methods "none topk:k=0.01,feedback=1"
    ... python bench/compressed_training.py --methods "none diloco:20 diloco:20:int4:feedback=1"

Each method trains the same model from the same start on the same batches. Shown is the loss on data that was not
trained on, at the end as the mean of the last fifth of the measurements, and what a rank sends per step. With several
seeds the differences from the first method are averaged, and shown with their standard error. A dedicated server makes
all contributions travel. `diloco:H` trains each rank alone for H steps, then agrees; see bps_rdma.torch.DiLoCo.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import bps_rdma
import bps_rdma.torch as bps

METHODS = (
    "none bf16 int8 int8:feedback=1 mxfp8 int4:feedback=1 "
    "topk:k=0.1,feedback=1 topk:k=0.01,feedback=1 onebit:feedback=1"
)
MODELS = {"gpt": "a character GPT, 109 thousand parameters", "images": "a convolution net"}
MEASUREMENTS = 40  # of a training
ROOT = Path(__file__).parents[1]


class Block(nn.Module):
    """Attention and a perceptron, both before normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.project(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Predicts the next character of a text."""

    LENGTH = 64

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(self.LENGTH, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4), nn.LayerNorm(width))
        self.read = nn.Linear(width, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]]))


def gpt() -> tuple[nn.Module, Callable[[nn.Module, int], torch.Tensor], float]:
    """A model, its loss on the batch of a seed, and a learning rate."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    held_out = len(data) // 10

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(abs(seed))
        low, high = (0, held_out) if seed < 0 else (held_out, len(data))
        starts = torch.randint(low, high - GPT.LENGTH - 1, (16,), generator=generator)
        rows = torch.stack([data[start : start + GPT.LENGTH + 1] for start in starts.tolist()])
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return GPT(len(letters)), loss, 3e-3


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy rings, squares, crosses and bars of any size and place, and which of them each is."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 4, (count,), generator=generator)
    size, row, column = torch.rand(3, count, 1, 1, generator=generator) * torch.tensor([4, 8, 8]).view(3, 1, 1, 1)
    y, x = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    size, dy, dx = size + 3, (y - row - 6).abs(), (x - column - 6).abs()
    shapes = torch.stack(
        [
            ((dy**2 + dx**2).sqrt() - size).abs() < 1,
            (torch.maximum(dy, dx) - size).abs() < 1,
            (torch.minimum(dy, dx) < 1) & (torch.maximum(dy, dx) < size),
            (dy < 1) & (dx < size),
        ]
    )
    pictures = shapes[kinds, torch.arange(count)].float()
    return (pictures + 1.2 * torch.randn(pictures.shape, generator=generator))[:, None], kinds


def images() -> tuple[nn.Module, Callable[[nn.Module, int], torch.Tensor], float]:
    """Tells the shapes from each other."""
    held_out = draw(2048, 10**9)

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        pictures, kinds = draw(32, seed) if seed >= 0 else [part.chunk(4)[-seed - 1] for part in held_out]
        return functional.cross_entropy(model(pictures), kinds)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(288, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )
    return model, loss, 2e-3


def optimizer_of(kind: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), 25 * rate, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), rate)


def train(make: Any, method: str, kind: str, steps: int, seed: int) -> tuple[list[float], float]:
    """The losses on data that was not trained on, and the bytes that a rank sends per step."""
    torch.manual_seed(seed)
    model, loss, rate = make()
    optimizer = optimizer_of(kind, model, rate)
    step_all: Any = optimizer
    trained: nn.Module = model
    if method.startswith("diloco:"):
        every, _, compression = method.removeprefix("diloco:").partition(":")
        how = bps.Compression.from_text(compression or "none")
        step_all = bps.DiLoCo(optimizer, every=int(every), compression=how)
    else:
        trained = bps.DistributedDataParallel(model, compression=bps.Compression.from_text(method))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    losses = []
    sent = bps_rdma.metrics()["total"]["data_bytes"]
    for step in range(steps):
        optimizer.zero_grad()
        loss(trained, 10**6 * seed + step * bps.size() + bps.rank()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step_all.step()
        schedule.step()
        if (step + 1) % (steps // MEASUREMENTS) == 0:
            with torch.no_grad():
                losses.append(statistics.mean(float(loss(model, seed)) for seed in range(-4, 0)))
    return losses, (bps_rdma.metrics()["total"]["data_bytes"] - sent) / steps


def plot(path: Path, steps: int, results: dict[str, dict[str, list[float]]]) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(11, 4), layout="constrained", squeeze=False)
    for axes, (title, found) in zip(panels[0], results.items(), strict=True):
        for method, losses in found.items():
            axes.plot(
                [(at + 1) * steps // MEASUREMENTS for at in range(len(losses))],
                losses,
                label=method,
                linewidth=2.5 if method == "none" else 1.2,
            )
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("step")
        axes.set_yscale("log")
    panels[0][0].set_ylabel("loss on data that was not trained on")
    panels[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help=f"at least {MEASUREMENTS}")
    parser.add_argument("--seeds", default="1", help="of the start and the batches; several: 1,2,3")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help="sgd: with a momentum of 0.9")
    parser.add_argument(
        "--methods", default=METHODS, help="separated by spaces; the first one is what others are compared with"
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="the curves, averaged over the seeds")
    args = parser.parse_args()
    if args.steps < MEASUREMENTS:
        parser.error(f"--steps {args.steps} is less than {MEASUREMENTS}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    torch.set_num_threads(1)
    bps.init()
    curves: dict[str, dict[str, list[float]]] = {}
    for name in args.models:
        title, make = MODELS[name], {"gpt": gpt, "images": images}[name]
        base: list[float] = []
        for method in args.methods.split():
            begin = time.monotonic()
            trained = [train(make, method, args.optimizer, args.steps, seed) for seed in seeds]
            ends = [statistics.mean(losses[-MEASUREMENTS // 5 :]) for losses, _ in trained]
            base = base or ends
            curves.setdefault(title, {})[method] = [
                statistics.mean(each) for each in zip(*(one[0] for one in trained), strict=True)
            ]
            differences = [100 * (end / plain - 1) for end, plain in zip(ends, base, strict=True)]
            error = statistics.stdev(differences) / len(seeds) ** 0.5 if len(seeds) > 1 else math.nan
            if bps.rank() == 0:
                print(
                    f"{title}, {args.optimizer}: {method:28} loss {statistics.mean(ends):.4f}, "
                    f"{statistics.mean(differences):+6.2f} % (standard error {error:.2f}), "
                    f"{statistics.mean(sent for _, sent in trained) / 1e3:8.1f} kB per step, "
                    f"{time.monotonic() - begin:.0f} s",
                    flush=True,
                )
    if bps.rank() == 0:
        if args.json:
            args.json.write_text(json.dumps({"steps": args.steps, "curves": curves}) + "\n")
        if args.plot:
            plot(args.plot, args.steps, curves)
    bps.shutdown()


if __name__ == "__main__":
    main()

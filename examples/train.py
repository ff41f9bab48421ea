# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network on images of ten classes, with any number of ranks.

    python examples/train.py
    torchrun --nproc-per-node 2 examples/train.py
    bps run -np 2 examples/train.py

The script is the same in all three cases. It generates the images: ten fixed patterns, shifted and noisy.
"""

import argparse
import signal
import time
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import bps_rdma.torch as bps

CLASSES, SIDE = 10, 28


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over all images (default: %(default)s)")
    parser.add_argument("--images", type=int, default=4000, help="training images of all ranks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per step of all ranks (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--strategy",
        choices=["naive", "flat", "overlap", "bucketed"],
        default="bucketed",
        help="when gradients are sent (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=["plain", "sharded"],
        default="plain",
        help="sharded: each rank keeps a part of the optimizer's state (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: each rank takes a GPU of its host (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="saved after each epoch, and where training goes on from; SIGUSR1 and SIGTERM end it after an epoch",
    )
    options = parser.parse_args()
    if options.checkpoint and options.optimizer == "sharded":
        parser.error("--checkpoint saves what rank 0 has, and that is a part only with --optimizer sharded")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine")
    return options


class Notice:
    """Remembers that a signal announced the end: a cluster sends one before it takes its hosts back."""

    def __init__(self) -> None:
        self.signum = 0
        for signum in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(signum, self.note)

    def note(self, signum: int, _: FrameType | None) -> None:
        """The signal handler."""
        self.signum = signum

    def agreed(self) -> int:
        """The signal that any rank got, or 0; the same on all ranks, which need not get it at the same time."""
        mine = self.signum  # one may come between the two questions
        if mean_over_ranks(float(mine == signal.SIGTERM)):
            return signal.SIGTERM
        return signal.SIGUSR1 if mean_over_ranks(float(mine != 0)) else 0


def save(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Write the checkpoint on rank 0. A reader finds the old file or the new one, and never a part."""
    if bps.rank() == 0:
        part = file.with_name(f"{file.name}.part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, part)
        part.replace(file)


def load(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take weights and optimizer state from the checkpoint, if there is one; returns how many epochs it has seen."""
    if not file.exists():
        return 0
    saved = torch.load(file, weights_only=True, map_location="cpu")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    say(f"going on after epoch {saved['epochs']}")
    return int(saved["epochs"])


def make_images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` images of shape (1, 28, 28) and their classes; the same on all ranks for the same seed."""
    patterns = torch.randn(CLASSES, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, SIDE, mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = patterns[labels]
    for axis in (2, 3):
        shifts = torch.randint(-2, 3, (count,), generator=generator)
        for shift in range(-2, 3):
            images[shifts == shift] = images[shifts == shift].roll(shift, dims=axis)
    return images + 2.0 * torch.randn(images.shape, generator=generator), labels


def make_model() -> nn.Module:
    """Two convolutions and a linear layer with 20,586 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, CLASSES),
    )


def mean_over_ranks(value: float) -> float:
    """The mean of `value` over all ranks."""
    return bps.push_pull(torch.tensor([value], dtype=torch.float64), name="mean").item()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of correct answers; each rank evaluates a part of the images."""
    model.eval()
    mine = slice(bps.rank(), None, bps.size())
    right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum().item()
    model.train()
    return mean_over_ranks(right) * bps.size() / len(labels)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> None:
    """Train all epochs; rank 0 prints a line after each. Raises SystemExit after a checkpoint at a signal."""
    notice = Notice() if options.checkpoint else None
    done = load(options.checkpoint, model, optimizer) if options.checkpoint else 0
    device = next(model.parameters()).device
    images, labels = (each.to(device) for each in make_images(options.images, seed=1))
    test_images, test_labels = (each.to(device) for each in make_images(2000, seed=2))
    share = max(options.batch // bps.size(), 1)  # images per step on this rank
    steps = max(options.images // (share * bps.size()), 1)
    begin = time.monotonic()
    for epoch in range(done, options.epochs):
        # Every rank draws the same order and takes different images from it.
        order = torch.randperm(options.images, generator=torch.Generator().manual_seed(epoch))
        mine = order[bps.rank() :: bps.size()]
        total = 0.0
        for step in range(steps):
            batch = mine[step * share : (step + 1) * share]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # afterwards every gradient is the mean over all ranks
            optimizer.step()
            total += loss.item()
        loss_of_all = mean_over_ranks(total / steps)
        share_right = accuracy(model, test_images, test_labels)
        say(f"epoch {epoch + 1}: loss {loss_of_all:.4f}, accuracy {share_right:.2%}, {time.monotonic() - begin:.1f} s")
        if notice:
            save(options.checkpoint, model, optimizer, epoch + 1)
            if signum := notice.agreed():
                say(f"stopped after epoch {epoch + 1} by {signal.Signals(signum).name}; start again to go on")
                bps.shutdown()
                # A warning is obeyed: no failure. After SIGTERM nobody may take this for the end of the training.
                raise SystemExit(0 if signum == signal.SIGUSR1 else 128 + signum)


def check_same_weights(model: nn.Module) -> None:
    """Compare all parameters with those of rank 0 bit by bit. Nothing corrects them during training."""
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    bps.broadcast_parameters(first, prefix="check.")
    same = all(torch.equal(param, first[name]) for name, param in model.named_parameters())
    if mean_over_ranks(float(same)) != 1.0:
        raise SystemExit(f"rank {bps.rank()}: the weights of the ranks differ")
    say(f"the weights are the same on all {bps.size()} ranks" if bps.size() > 1 else "trained on one rank")


def say(text: str) -> None:
    """Print once, on rank 0."""
    if bps.rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Train, and check that all ranks have the same weights."""
    options = parse_arguments()
    bps.init()
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(bps.rank())  # any seed: DistributedDataParallel copies the weights of rank 0
    if options.device == "cuda":
        torch.cuda.set_device(bps.local_rank() % torch.cuda.device_count())  # ranks share GPUs where these are fewer
    model = bps.DistributedDataParallel(make_model().to(options.device), strategy=options.strategy)
    if options.optimizer == "sharded":
        optimizer: torch.optim.Optimizer = bps.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=options.lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    say(f"{bps.size()} ranks, {options.strategy} gradients, {options.optimizer} optimizer")
    train(model, optimizer, options)
    check_same_weights(model)
    bps.shutdown()


if __name__ == "__main__":
    main()

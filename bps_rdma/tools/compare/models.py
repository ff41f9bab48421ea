# SPDX-License-Identifier: Apache-2.0
"""The models to train: a perceptron, and GPT-like transformers of several sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TransformerShape:
    """The shape of a transformer, which has about 12 * width^2 * layers + width * words parameters."""

    width: int
    layers: int
    heads: int
    words: int


SHAPES = {
    "gpt-5m": TransformerShape(256, 4, 4, 8192),
    "gpt-25m": TransformerShape(512, 6, 8, 8192),
    "gpt-100m": TransformerShape(768, 12, 12, 16384),
    "gpt-500m": TransformerShape(1280, 24, 20, 16384),
}
MODELS = ("mlp", *SHAPES)


class Perceptron(nn.Module):
    """A perceptron with three hidden layers of 512."""

    def __init__(self) -> None:
        super().__init__()
        widths = (512, 512, 512, 512, 16)
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of a batch of shape (n, 512)."""
        out: torch.Tensor = (self.layers(x) - 1).pow(2).mean()
        return out


class Transformer(nn.Module):
    """A decoder that shares its embedding with the output layer."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(shape.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each next token of a batch of shape (batch, length)."""
        x = self.words(tokens)
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        guesses = self.norm(x[:, :-1]) @ self.words.weight.t()
        return nn.functional.cross_entropy(guesses.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(name: str) -> nn.Module:
    """The model of this name, with the same weights on all ranks."""
    torch.manual_seed(1)
    return Perceptron() if name == "mlp" else Transformer(SHAPES[name])


def make_batch(name: str, samples: int, length: int, rank: int) -> torch.Tensor:
    """The batch of a rank: samples of `length` tokens, or of 512 numbers for the perceptron."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if name == "mlp":
        batch = torch.randn(samples, 512, generator=generator, device="cpu")
    else:
        batch = torch.randint(0, SHAPES[name].words, (samples, length), generator=generator, device="cpu")
    return batch.to(torch.get_default_device())

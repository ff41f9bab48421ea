# SPDX-License-Identifier: Apache-2.0
"""What the tests of ShardedOptimizer share: optimizers, a model, and comparisons bit by bit."""

from typing import Any

import torch

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
}


class Model(torch.nn.Module):
    """Parameters on both sides of the size below which they travel together, one never used, one frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(20, 900)  # 72 kB
        self.second = torch.nn.Linear(900, 30)  # 108 kB
        self.third = torch.nn.Linear(30, 4)
        self.unused = torch.nn.Linear(7, 7)
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))) + self.frozen[0]


def backward(model: torch.nn.Module, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step)).to(parameter.dtype)
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Dicts, lists and tensors, bit by bit."""
    assert type(left) is type(right) or isinstance(left, torch.Tensor), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left.detach(), right.detach()), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key, value in left.items():
            assert_same(value, right[key], f"{where} {key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for place, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where} {place}")
    else:
        assert left == right, where


def assert_same_models(left: torch.nn.Module, right: torch.nn.Module) -> None:
    assert_same(dict(left.state_dict()), dict(right.state_dict()))


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))

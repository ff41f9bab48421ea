# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer, by the names under which all ranks know them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bps_rdma.errors import InvalidArgumentError, InvalidTensorError


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) for every parameter of the optimizer, frozen ones too: `named`, if there is one.

    Raises:
        InvalidArgumentError: a name twice, a parameter without a name, or no optimizer.
        InvalidTensorError: a parameter has no shape yet; names it.
    """
    if not hasattr(optimizer, "param_groups"):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} is not an optimizer", "pass one, such as torch.optim.SGD(...)"
        )
    parameters = [p for options in optimizer.param_groups for p in options["params"]]
    pairs = [(f"parameter {number}", p) for number, p in enumerate(parameters)] if named is None else list(named)
    for name, p in pairs:
        if torch.nn.parameter.is_lazy(p):
            raise InvalidTensorError(f"{name!r} has no shape yet", "run the lazy module once first")
    names = {name for name, _ in pairs}
    if len(names) < len(pairs):
        twice = sorted(name for name in names if [n for n, _ in pairs].count(name) > 1)
        raise InvalidArgumentError(f"parameters have the same name: {', '.join(twice)}", "give each its own name")
    wanted = {id(p) for p in parameters}
    unnamed = wanted - {id(p) for _, p in pairs}
    if unnamed:
        raise InvalidArgumentError(
            f"{len(unnamed)} parameters of the optimizer have no name", "pass named_parameters=model.named_parameters()"
        )
    return pairs


class FixedParameters:
    """The parameters on which ranks that train by themselves agree from time to time: always the same ones.

    Args:
        optimizer: whose.
        named: as for names_of().

    Attributes:
        all: (name, parameter) of the optimizer's, frozen ones too.
        named: of those that are trained.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
    ) -> None:
        pairs = names_of(optimizer, named)
        own = {p for options in optimizer.param_groups for p in options["params"]}
        self.all = [(name, p) for name, p in pairs if p in own]
        self.named = [(name, p) for name, p in self.all if p.requires_grad]
        self._names = {p: name for name, p in pairs}
        self._known = {p: (p.dtype, p.shape) for _, p in self.named}

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        """The name of one of them."""
        return self._names[parameter]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises InvalidArgumentError if another parameter is trained now, or one has become another; names it."""
        parameters = [p for options in optimizer.param_groups for p in options["params"]]
        for number, p in enumerate(parameters):
            if p.requires_grad and p not in self._known:
                raise InvalidArgumentError(
                    f"{self._names.get(p, f'parameter {number}')!r} is trained now, and the ranks would not agree on "
                    "it: it was frozen or missing when the optimizer was wrapped",
                    "wrap it when all parameters that are going to be trained require gradients",
                )
            if p in self._known:
                self._check_kind(p, *self._known[p])

    def _check_kind(self, parameter: torch.nn.Parameter, dtype: torch.dtype, shape: torch.Size) -> None:
        """What is kept for a parameter has the dtype and the shape that it had: it must not have become wider."""
        now = parameter.dtype
        if parameter.shape != shape or (now.itemsize > dtype.itemsize):
            raise InvalidArgumentError(
                f"{self.name_of(parameter)!r} is {_kind(now, parameter.shape)} now, and was {_kind(dtype, shape)} when "
                "the optimizer was wrapped",
                "wrap it when all parameters have the dtypes and the shapes in which they are going to be trained",
            )


def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"

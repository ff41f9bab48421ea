"""Gives an optimizer other methods, without a copy of its state; takes hooks away again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from bps_rdma.errors import InvalidArgumentError

T = TypeVar("T")


def adopt(optimizer: torch.optim.Optimizer, methods: type[T]) -> T:
    """The same optimizer, with other methods: state, param_groups and hooks are those of `optimizer`, not copies.

    Learning-rate schedulers may have been made with either of the two. The result is an instance of `methods` and of
    the optimizer's own class.

    Raises:
        InvalidArgumentError: it has them already.
    """
    own = type(optimizer)
    if issubclass(own, methods):
        raise InvalidArgumentError(f"this {own.__name__} is distributed already", "wrap an optimizer once")
    kind: Any = type(own.__name__, (methods, own), {"__doc__": methods.__doc__, "__module__": own.__module__})
    adopted = kind.__new__(kind)
    # Schedulers wrap the step() of the instance; that of the other class must be found again.
    optimizer.__dict__.pop("step", None)
    adopted.__dict__ = optimizer.__dict__
    return adopted  # type: ignore[no-any-return]


def remove_hooks(hooks: Iterable[Any]) -> None:
    """Takes away what register_..._hook() returned."""
    for hook in hooks:
        hook.remove()

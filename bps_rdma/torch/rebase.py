# SPDX-License-Identifier: Apache-2.0
"""Gives an optimizer another base class, without a copy of its state; removes hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from bps_rdma.errors import InvalidArgumentError

T = TypeVar("T")


def rebase(optimizer: torch.optim.Optimizer, methods: type[T]) -> T:
    """The same optimizer, with other methods: state, param_groups and hooks are those of `optimizer`, not copies.

    Learning-rate schedulers may have been made with either of the two. The result is an instance of `methods` and of
    the optimizer's own class.

    Raises:
        InvalidArgumentError: the optimizer has these methods already.
    """
    own = type(optimizer)
    if issubclass(own, methods):
        raise InvalidArgumentError(f"this {own.__name__} is distributed already", "wrap an optimizer once")
    rebased: Any = new_instance(methods, own)
    # Schedulers wrap the step() of the instance; that of the new class must be found instead.
    optimizer.__dict__.pop("step", None)
    rebased.__dict__ = optimizer.__dict__
    return rebased  # type: ignore[no-any-return]


def new_instance(methods: type, own: type) -> Any:
    """An empty optimizer of the class that rebase() makes of these two."""
    about = {"__doc__": methods.__doc__, "__module__": own.__module__, "_bps_made_of": (methods, own)}
    kind: Any = type(own.__name__, (methods, own), about)
    return kind.__new__(kind)


def remove_hooks(hooks: Iterable[Any]) -> None:
    """Removes hooks, given what their registration returned."""
    for hook in hooks:
        hook.remove()

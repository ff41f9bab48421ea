# SPDX-License-Identifier: Apache-2.0
"""Stops an optimizer that uses gradients before they are averaged, as one does that steps in a hook of backward.

Each rank would step on its own gradients. torch calls a hook of ours before each step. While a pass is open, it looks
whether the optimizer has parameters of that pass. A hook of a parameter that was there before ours may make a step
before the pass has begun: that is remembered until the gradient comes to the pass, in the same thread.

Inside of no_sync() there is no pass, and a script that steps there means the gradients of its rank.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bps_rdma.errors import BpsError
from bps_rdma.torch.units import IndexedParameter

_AFTER = "make the step of the optimizer when backward() has returned, not in a hook"
_FAILED = (
    "backward() has failed: call finish_gradient_synchronization(); if that returns, all ranks have means, and step"
)


class Averages(Protocol):
    """What averages gradients."""

    entries: list[IndexedParameter]

    @property
    def open(self) -> bool:
        """Whether a pass is open: these gradients are no means yet."""


class _LastStep(threading.local):
    task = -1  # the backward, by its number
    parameter: weakref.ref[torch.Tensor] | None = None  # in a hook of which it was made


_last = _LastStep()
_begun: set[weakref.ref[Averages]] = set()  # those that had an open pass when the last step was made, or have one now


@functools.cache
def begin_to_look() -> None:
    """From now on steps are looked at; the hook stays for the life of the process."""
    register_optimizer_step_pre_hook(_look)


def watch(averages: Averages) -> None:
    """A pass is open now."""
    _begun.add(weakref.ref(averages))


def has_stepped_on(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer of this parameter has made a step in the hook that has just run for its gradient."""
    if _last.task == -1 or _last.task != torch._C._current_graph_task_id():
        return False
    return _last.parameter is not None and _last.parameter() is parameter


def error_of_step(entry: IndexedParameter, hint: str = _AFTER) -> BpsError:
    """The error of a step that uses a gradient too early."""
    return BpsError(f"an optimizer steps on the gradient of {entry.name!r} before it is averaged", hint)


def _look(optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    task = torch._C._current_graph_task_id()
    if _begun and not getattr(optimizer, "_bps_takes_means", False):
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        if task != -1 or closure is None:  # a closure may compute other gradients first
            _check(optimizer, task != -1)
    if task != -1:
        _remember(optimizer, task)


def _check(optimizer: torch.optim.Optimizer, is_in_backward: bool) -> None:
    for one in tuple(_begun):
        averages = one()
        if averages is None or not averages.open:
            _begun.discard(one)
            continue
        own = {id(each) for options in optimizer.param_groups for each in options["params"] if each.grad is not None}
        for entry in averages.entries if own else ():
            if id(entry.parameter) in own:
                if is_in_backward:
                    raise error_of_step(entry)
                raise error_of_step(entry, _FAILED)


def _remember(optimizer: torch.optim.Optimizer, task: int) -> None:
    parameter = getattr(torch._C._current_autograd_node(), "variable", None)  # of the node that adds to .grad
    own = (each for options in optimizer.param_groups for each in options["params"])
    if parameter is not None and any(each is parameter for each in own):
        _last.task, _last.parameter = task, weakref.ref(parameter)

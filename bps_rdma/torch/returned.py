# SPDX-License-Identifier: Apache-2.0
"""Stops an optimizer that is about to use gradients which DistributedDataParallel has not averaged.

It averages what backward() adds to .grad. torch.autograd.grad() and torch.func.grad() return gradients instead. A
script that puts these into .grad by itself would train every rank on its own samples, and nobody would notice.

A script may average by itself what it got, in any way. So the bytes that its operations have moved since then tell:
with fewer than two for each element it cannot have averaged them. A loss for a log is less than that, and what our
wrappers move for other gradients, and for buffers, does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import BpsError
from bps_rdma.torch import transfer
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.wrapping import remove_hooks

_BYTES = 2  # for an element: a script may send gradients as bfloat16, or twice as int8, to a root and back


class ReturnedGradients:
    """Those of a module since its last pass. While there are any, it looks at the steps of all optimizers.

    Args:
        module: the wrapped one.
        group: who averages; a rank alone may use its own gradients.
    """

    def __init__(self, module: torch.nn.Module, group: Group | None) -> None:
        self._module, self._group = module, group
        self._without: set[torch.nn.Parameter] = set()  # had no .grad then: what has one by now may be a mean
        self._moved = 0  # bytes: before that, and since then by what has averaged none of these gradients
        self._hooks: list[Any] = []
        weakref.finalize(self, remove_hooks, self._hooks)

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients of these are being returned to the script."""
        found = [each for each in parameters if each.grad is None]
        if not found:
            return
        if not self._without:  # else the script may have averaged some of these, and gets the rest
            self._moved = _moved()
        self._without.update(found)
        _looking.add(self)
        if not self._hooks:
            check = weakref.WeakMethod(self._check)

            def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                method = check()
                if method is not None:
                    method(optimizer)

            self._hooks.append(register_optimizer_step_pre_hook(look))

    def discard(self, parameter: torch.nn.Parameter) -> None:
        """Backward has added a gradient of this rank alone to its .grad: the script means to use that."""
        self._without.discard(parameter)

    def forget(self) -> None:
        """A pass has averaged gradients."""
        self._without.clear()
        _looking.discard(self)
        remove_hooks(self._hooks)
        self._hooks.clear()

    def _others_moved(self, nbytes: int, averaged: Sequence[torch.nn.Parameter]) -> None:
        mine = self._without.intersection(averaged)
        if mine:
            self._without -= mine
        else:
            self._moved += nbytes

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._without:
            return
        mine = [each for group in optimizer.param_groups for each in group["params"] if each in self._without]
        put = [each for each in mine if each.grad is not None]
        if not put:
            return
        least = _BYTES * sum(_elements(each.grad) for each in put) // sharers()
        now = _moved()
        moved = now - self._moved if now >= self._moved else now  # they begin at zero again where a member was lost
        if members_of(self._group).size > 1 and moved < least:
            name = next((name for name, each in self._module.named_parameters() if each is put[0]), "a parameter")
            raise BpsError(
                f"the gradient of {name!r} comes from torch.autograd.grad() or torch.func.grad(), which nobody has "
                "averaged",
                "call backward(), or wrap the optimizer with DistributedOptimizer instead of the model; to average "
                "gradients by yourself, compute them with model.module",
            )
        self._without.difference_update(put)  # but the hook stays: torch goes through all hooks at this moment
        self._moved += least  # the rest of the parameters may belong to another optimizer


_looking: weakref.WeakSet[ReturnedGradients] = weakref.WeakSet()


def others_moved(nbytes: Callable[[], int], averaged: Callable[[], Sequence[torch.nn.Parameter]] = list) -> None:
    """A wrapper has moved bytes by itself.

    Args:
        nbytes: how many at least; called where somebody wants to know.
        averaged: the parameters whose gradients are means now.
    """
    for each in tuple(_looking) if _looking else ():
        each._others_moved(nbytes(), averaged())


def sharers() -> int:
    """How many ranks share what one of them would move: the GPUs of a host may sum first."""
    return bps_rdma.local_size() if transfer.on_hosts() else 1


def _elements(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    return (gradient._values() if gradient.layout is torch.sparse_coo else gradient).numel()


def _moved() -> int:
    """Bytes of all operations of this rank."""
    return int(bps_rdma.metrics()["total"]["operation_bytes"])

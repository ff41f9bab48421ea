# SPDX-License-Identifier: Apache-2.0
"""Stops an optimizer that is about to use gradients which DistributedDataParallel has not averaged.

It averages what backward() adds to .grad. torch.autograd.grad() and torch.func.grad() return gradients instead. A
script that puts these into .grad by itself would train every rank on its own samples, and nobody would notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import BpsError
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.wrapping import remove_hooks


class ReturnedGradients:
    """Those of a module since its last pass. While there are any, it looks at the steps of all optimizers.

    Args:
        module: the wrapped one.
        group: who averages; a rank alone may use its own gradients.
    """

    def __init__(self, module: torch.nn.Module, group: Group | None) -> None:
        self._module, self._group = module, group
        self._without: set[torch.nn.Parameter] = set()  # had no .grad then: what has one by now may be a mean
        self._operations = 0  # before that; a script may average by itself what it got
        self._hooks: list[Any] = []
        weakref.finalize(self, remove_hooks, self._hooks)

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients of these are being returned to the script."""
        found = [each for each in parameters if each.grad is None]
        if not found:
            return
        self._without.update(found)
        self._operations = _operations()
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
        remove_hooks(self._hooks)
        self._hooks.clear()

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._without:
            return
        mine = [each for group in optimizer.param_groups for each in group["params"] if each in self._without]
        put = [each for each in mine if each.grad is not None]
        if not put:
            return
        self._without.clear()  # but the hook stays: torch goes through all hooks at this moment
        if members_of(self._group).size > 1 and _operations() == self._operations:
            name = next((name for name, each in self._module.named_parameters() if each is put[0]), "a parameter")
            raise BpsError(
                f"the gradient of {name!r} comes from torch.autograd.grad() or torch.func.grad(), which nobody has "
                "averaged",
                "call backward(), or wrap the optimizer with DistributedOptimizer instead of the model; to average "
                "gradients by yourself, compute them with model.module",
            )


def _operations() -> int:
    return int(bps_rdma.metrics()["total"]["operations"])

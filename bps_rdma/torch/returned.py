# SPDX-License-Identifier: Apache-2.0
"""Stops an optimizer that is about to use gradients which DistributedDataParallel has not averaged.

It averages what backward() adds to .grad. torch.autograd.grad() returns gradients instead. A script that puts these
into .grad by itself would train every rank on its own samples, and nobody would notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
        # .grad when the gradient was returned: weakly, as one that somebody holds is copied out of its bucket.
        self._before: dict[torch.nn.Parameter, weakref.ref[torch.Tensor] | None] = {}
        self._hooks: list[Any] = []
        weakref.finalize(self, remove_hooks, self._hooks)

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The gradients of these are being returned to the script."""
        for parameter in parameters:
            self._before.setdefault(parameter, None if parameter.grad is None else weakref.ref(parameter.grad))
        if self._before and not self._hooks:
            check = weakref.WeakMethod(self._check)

            def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                method = check()
                if method is not None:
                    method(optimizer)

            self._hooks.append(register_optimizer_step_pre_hook(look))

    def forget(self) -> None:
        """A pass has averaged gradients, or an optimizer has made its step."""
        self._before.clear()
        remove_hooks(self._hooks)
        self._hooks.clear()

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        mine = [each for group in optimizer.param_groups for each in group["params"] if each in self._before]
        if not mine:
            return
        put = [each for each in mine if each.grad is not None and not self._is_as_before(each)]
        self.forget()
        if put and members_of(self._group).size > 1:
            name = next((name for name, each in self._module.named_parameters() if each is put[0]), "a parameter")
            raise BpsError(
                f"the gradient of {name!r} comes from torch.autograd.grad(), so it has not been averaged",
                "call backward(), or wrap the optimizer with DistributedOptimizer instead of the model; to average "
                "gradients by yourself, compute them with model.module",
            )

    def _is_as_before(self, parameter: torch.nn.Parameter) -> bool:
        before = self._before[parameter]
        return before is not None and before() is parameter.grad

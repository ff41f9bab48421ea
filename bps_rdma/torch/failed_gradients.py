# SPDX-License-Identifier: Apache-2.0
"""Watches what a backward that has failed has left in gradients: a part of a batch, to which others must not be added.

A script may zero it in any way, by the model, by an optimizer or by itself. So each parameter tells, before autograd
adds to its gradient once more, whether that still is what was left.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from bps_rdma.torch.backward import returned_of
from bps_rdma.torch.seen_gradients import SeenGradients
from bps_rdma.torch.wrapping import remove_hooks


class FailedGradients:
    """What the last backward has left, if it has failed, until the script has zeroed it."""

    def __init__(self) -> None:
        self._left: SeenGradients | None = None
        self._hooks: list[Any] = []
        self._is_mixed = False  # the running backward has added to it

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A backward of these has failed."""
        self.forget()
        trained = [each for each in parameters if each.requires_grad]
        self._left = SeenGradients.after_an_error(trained)
        if self._left is not None:
            self._hooks = [each.register_hook(partial(self._look, each)) for each in trained]  # type: ignore[no-untyped-call]

    def _look(self, parameter: torch.nn.Parameter, _: torch.Tensor) -> None:
        if self._left is not None and self._left.is_there(parameter) and not returned_of((parameter,)):
            self._is_mixed = True

    def are_there(self) -> bool:
        """Whether they would be a part of what is averaged now."""
        return self._is_mixed or (self._left is not None and self._left.any_is_there())

    def end_backward(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A backward has come to its end: what it has added to is still no gradient of anything."""
        if self._is_mixed:
            self.note(parameters)
        elif self._left is not None and not self._left.any_is_there():
            self.forget()

    def forget(self) -> None:
        """Gradients are those of a whole pass."""
        remove_hooks(self._hooks)
        self._hooks, self._left, self._is_mixed = [], None, False

# SPDX-License-Identifier: Apache-2.0
"""Watches what a backward that has failed has left in gradients: a part of a batch, to which others must not be added.

A script may zero it in any way, by the model, by an optimizer or by itself. So each parameter tells, before autograd
adds to its gradient once more, whether that still is what was left. A script that has zeroed one of them has zeroed
those that it uses: others may be in no optimizer.
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
        self._mixed: torch.nn.Parameter | None = None  # the running backward has added to the gradient of this one

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A backward of these has failed."""
        self.forget()
        trained = [each for each in parameters if each.requires_grad]
        self._left = SeenGradients.after_an_error(trained)
        if self._left is not None:
            self._hooks = [each.register_hook(partial(self._look, each)) for each in trained]  # type: ignore[no-untyped-call]

    def _look(self, parameter: torch.nn.Parameter, _: torch.Tensor) -> None:
        left = self._left
        if left is not None and left.is_there(parameter) and not left.any_has_gone() and not returned_of((parameter,)):
            self._mixed = self._mixed if self._mixed is not None else parameter

    def first_there(self) -> torch.nn.Parameter | None:
        """A parameter of which they would be a part of what is averaged now; None: there is none."""
        left = self._left
        if self._mixed is not None or left is None or left.any_has_gone():
            return self._mixed
        return left.first_there()

    def end_backward(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A backward has come to its end: what it has added to is still no gradient of anything."""
        if self._mixed is not None:
            self.note(parameters)
        elif self._left is not None and self.first_there() is None:
            self.forget()

    def forget(self) -> None:
        """Gradients are those of a whole pass."""
        remove_hooks(self._hooks)
        self._hooks, self._left, self._mixed = [], None, None

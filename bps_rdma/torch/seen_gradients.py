# SPDX-License-Identifier: Apache-2.0
"""Remembers which gradients there were, to tell later whether a script has changed or replaced them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable

import torch

from bps_rdma.torch.check_alike import digest_of_some


class SeenGradients:
    """The gradients of parameters at one time. It holds none of them: a script may free their memory meanwhile.

    Args:
        parameters: those whose gradients it sees now.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._seen = {id(each): _Seen(each) for each in parameters}

    @staticmethod
    def after_an_error(parameters: Iterable[torch.nn.Parameter]) -> SeenGradients | None:
        """None where they cannot be read, as from a device that has failed: the caller's error tells more than ours."""
        with contextlib.suppress(Exception):
            return SeenGradients(parameters)
        return None

    def all_are_there(self) -> bool:
        """Whether all of them are as they were, and no other one has come."""
        seen = self._seen.values()
        return any(each.was_there for each in seen) and all(each.is_as_it_was() for each in seen)

    def first_there(self) -> torch.nn.Parameter | None:
        """One whose gradient is as it was, and not zero."""
        return next((each.parameter for each in self._seen.values() if each.was_used and each.is_as_it_was()), None)

    def any_is_there(self) -> bool:
        """Whether there is such a one."""
        return self.first_there() is not None

    def any_has_gone(self) -> bool:
        """Whether one that was not zero is not as it was."""
        return any(each.was_used and not each.is_as_it_was() for each in self._seen.values())

    def is_there(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient of this one is as it was, and not zero."""
        seen = self._seen.get(id(parameter))
        return seen is not None and seen.was_used and seen.is_as_it_was()


def is_used(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient that nobody has zeroed."""
    if gradient is None:
        return False
    values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    return bool(values.any())


class _Seen:
    def __init__(self, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        self.parameter, self.was_there, self.was_used = parameter, gradient is not None, is_used(gradient)
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = None if gradient is None else gradient._version
        self._digest = _digest_of(gradient)

    def is_as_it_was(self) -> bool:
        gradient = self.parameter.grad
        if gradient is None or self._gradient is None:
            return gradient is None and self._gradient is None
        if self._gradient() is not gradient or gradient._version != self._version:
            return False
        return _digest_of(gradient) == self._digest


def _digest_of(gradient: torch.Tensor | None) -> str:
    """Of its values, as what is written to `.data` changes no version. Sparse ones have none."""
    return "" if gradient is None or gradient.layout is not torch.strided else digest_of_some(gradient)

# SPDX-License-Identifier: Apache-2.0
"""What CrossBarrier puts into .grad while a gradient is being averaged."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bps_rdma.errors import BpsError


class PendingGradient(torch.Tensor):
    """Stands for the gradient of a parameter in .grad, and raises an error that names it when it is used.

    It has no memory but one element; zero_grad() replaces it.
    """

    _bps_name: str
    _bps_like: tuple[torch.dtype, torch.device, torch.Size]  # dtype, device and shape of the parameter

    @staticmethod
    def of(parameter: torch.nn.Parameter, name: str) -> PendingGradient:
        """One for this parameter."""
        one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made: PendingGradient = torch.Tensor._make_subclass(PendingGradient, one.expand(parameter.shape))
        made._bps_name = name
        made._bps_like = parameter.dtype, parameter.device, parameter.shape
        return made

    @classmethod
    def __torch_function__(cls, _func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses any use of the gradient.

        Raises:
            BpsError: always.
        """
        for one in tree_leaves((args, kwargs)):
            if type(one) is cls:
                raise error_of(one._bps_name)
        raise error_of("a parameter")


def error_of(name: str) -> BpsError:
    """The error of using a gradient that is being averaged."""
    return BpsError(
        f"the gradient of {name!r} was used while it is being averaged: CrossBarrier uses it in the next forward, and "
        "shows it to nobody",
        "call zero_grad() between step() and backward(); use DistributedOptimizer to clip, scale or read gradients",
    )

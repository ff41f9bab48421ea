# SPDX-License-Identifier: Apache-2.0
"""What the functions of the torch face make of their arguments: names, groups, and tensors that they cannot use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypedDict

import torch

from bps_rdma import argument_types
from bps_rdma.devices import are_carried
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.group import Group
from bps_rdma.operations.options import OperationOptions, Reduction
from bps_rdma.operations.unnamed import unnamed
from bps_rdma.torch import transfer
from bps_rdma.torch.checks import check_tensor
from bps_rdma.torch.membership import AnyGroup, group_of


def ours(group: AnyGroup) -> Group | None:
    """The group of bps_rdma for one of either kind."""
    return None if group is None else group_of(group)


class Moving(TypedDict, total=False):
    """Keywords of every operation, as bps_rdma's, but for groups of either kind."""

    priority: int
    group: AnyGroup
    timeout: float | None


class Reducing(Moving, Reduction, total=False):
    """Keywords of an operation that reduces."""


def for_core(options: Moving) -> dict[str, Any]:
    """The keywords for the function of bps_rdma."""
    return {**options, "group": ours(options.get("group"))}


def full_name(name: str | None) -> str | None:
    """The name for the core: names of the torch face are its own. None stays, and calls meet by their order."""
    argument_types.explain(name=name)  # in the caller's words: formatted, any object would be a text
    return f"byteps.{name}" if name else None


def required_name(name: str) -> str:
    """full_name() of a name that must be there.

    Raises:
        InvalidArgumentError: it is not.
    """
    full = full_name(name)
    if full is None:
        raise InvalidArgumentError(f"name={name!r} names nothing", "pass a name, the same on all ranks")
    return full


def name_here(name: str | None, tensor: torch.Tensor) -> str:
    """full_name() of the name; without one, one that is made from the calling function, the dtype and the size."""
    check_tensor(tensor)
    return full_name(name) or f"byteps.{call_site(tensor)}"


def by_name(name: str | None, options: OperationOptions) -> OperationOptions:
    """The options of a sum whose caller has given it this name; see unnamed()."""
    return options if name else unnamed(options)


def call_site(tensor: torch.Tensor) -> str:
    """Names a call by function, dtype and size; not by its line, since ranks may call from different branches."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "bps_rdma" and frame.f_back is not None:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
    return f"{place}.{str(tensor.dtype).removeprefix('torch.')}.{tensor.numel()}"


def check_out(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raises InvalidTensorError for an `out` that cannot receive what is made of `tensor`."""
    check_tensor(out)
    if out.device != tensor.device:
        raise InvalidTensorError(
            f"`out` is on {out.device}, and the tensor on {tensor.device}", "pass both on one device"
        )


def in_core(tensor: torch.Tensor, call: str) -> Any:
    """The tensor, for an operation of the core, which takes CUDA tensors only with BPS_DEVICE_ROUTE.

    Raises:
        InvalidTensorError: it does not take this one.
    """
    return tensor if isinstance(tensor, torch.Tensor) and tensor.is_cuda and are_carried() else on_cpu(tensor, call)


def on_cpu(tensor: torch.Tensor, call: str) -> Any:
    """The tensor, for an operation that has no route from a device.

    Raises:
        InvalidTensorError: it is on one.
    """
    check_tensor(tensor)
    if transfer.device_of(tensor) is not None:
        raise InvalidTensorError(
            f"{call}() has no route for tensors on a device, and this one is on {tensor.device}",
            "pass tensor.cpu(), or use push_pull(), reduce_scatter(), all_gather() or broadcast()",
        )
    return tensor

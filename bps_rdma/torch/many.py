# SPDX-License-Identifier: Apache-2.0
"""push_pull of many torch tensors with one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

from bps_rdma import arrays
from bps_rdma.handle import PythonHandle
from bps_rdma.operations import OperationOptions
from bps_rdma.operations.many import like, named
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import AnyCompression, ReduceName, reduction, text_of
from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import full_name, ours
from bps_rdma.torch.checks import check_tensor
from bps_rdma.torch.membership import AnyGroup


@overload
def push_pull_many(
    tensors: Mapping[str, torch.Tensor],
    name: str | None = ...,
    *,
    average: bool = ...,
    op: ReduceName | None = ...,
    inplace: bool = ...,
    priority: int = ...,
    group: AnyGroup = ...,
    timeout: float | None = ...,
    compression: AnyCompression | None = ...,
    exact: bool | None = ...,
) -> dict[str, torch.Tensor]: ...
@overload
def push_pull_many(
    tensors: Sequence[torch.Tensor],
    name: str | None = ...,
    *,
    average: bool = ...,
    op: ReduceName | None = ...,
    inplace: bool = ...,
    priority: int = ...,
    group: AnyGroup = ...,
    timeout: float | None = ...,
    compression: AnyCompression | None = ...,
    exact: bool | None = ...,
) -> list[torch.Tensor]: ...
def push_pull_many(
    tensors: Any,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    inplace: bool = False,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> Any:
    """Sums (or averages) many tensors over the group at the same time; see bps_rdma.push_pull_many().

    No gradient flows. The tensors may be on the CPU and on CUDA devices.
    """
    found = push_pull_many_async(
        tensors,
        name,
        average=average,
        op=op,
        inplace=inplace,
        priority=priority,
        group=group,
        timeout=timeout,
        compression=compression,
        exact=exact,
    ).wait()
    if inplace:
        for _, tensor in named(tensors, None):
            arrays.note_change(tensor)
    return found


def push_pull_many_async(
    tensors: Any,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    inplace: bool = False,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> PythonHandle[Any]:
    """Starts push_pull_many(); the handle gives the results. No tensor may be changed until then."""
    how = text_of(compression, exact)
    options = OperationOptions(reduction(average, op), None, priority, ours(group), timeout, False, how)
    full_name(name)  # or an error in the caller's words
    found = [(full_name(each), tensor) for each, tensor in named(tensors, name)]
    for _, tensor in found:
        check_tensor(tensor)
        transfer.check_reducible(tensor, options)  # or an error, before anything is sent
    new = {each: tensor for each, tensor in found if each is not None}
    if new:
        transfer.declare_many(new, options.group, how)
    results, handles = [], []
    for place, (each, tensor) in enumerate(found):
        data = tensor.detach()
        results.append(tensor if inplace else torch.empty_like(data))
        own = options._replace(name=each, priority=priority + len(found) - 1 - place)
        handles.append(transfer.all_reduce(data, own, None if inplace else results[-1]))
        if inplace:
            arrays.note_change(tensor)
    return Together(handles, lambda: like(tensors, results))

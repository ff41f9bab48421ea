# SPDX-License-Identifier: Apache-2.0
"""push_pull of many torch tensors with one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch

import bps_rdma
from bps_rdma import arrays
from bps_rdma.handle import PythonHandle
from bps_rdma.operations.begun import of_thread, start_all, whole
from bps_rdma.operations.many import check_shared, like, named
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import OperationOptions, reducing
from bps_rdma.positions import Unpack, keywords_of
from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import Reducing, for_core, full_name
from bps_rdma.torch.checks import check_tensor


@overload
def push_pull_many(
    tensors: Mapping[str, torch.Tensor], name: str | None = ..., *, inplace: bool = ..., **options: Unpack[Reducing]
) -> dict[str, torch.Tensor]: ...
@overload
def push_pull_many(
    tensors: Sequence[torch.Tensor], name: str | None = ..., *, inplace: bool = ..., **options: Unpack[Reducing]
) -> list[torch.Tensor]: ...
@whole
@keywords_of(bps_rdma.push_pull_many, group="AnyGroup")
def push_pull_many(tensors: Any, name: str | None = None, *, inplace: bool = False, **options: Unpack[Reducing]) -> Any:
    """Sums (or averages) many tensors over the group at the same time; see bps_rdma.push_pull_many().

    No gradient flows. The tensors may be on the CPU and on CUDA devices.
    """
    found = _together(tensors, name, inplace, reducing(None, False, **for_core(options))).wait()
    if inplace:
        for _, tensor in named(tensors, None):
            arrays.note_change(tensor)
    return found


@whole
@keywords_of(bps_rdma.push_pull_many, group="AnyGroup")
def push_pull_many_async(
    tensors: Any, name: str | None = None, *, inplace: bool = False, **options: Unpack[Reducing]
) -> PythonHandle[Any]:
    """Starts push_pull_many(); the handle gives the results. No tensor may be changed until then."""
    return _together(tensors, name, inplace, reducing(None, False, **for_core(options)))


def _together(tensors: Any, name: str | None, inplace: bool, shared: OperationOptions) -> Together:
    full_name(name)  # or an error in the caller's words
    found = [(full_name(each), tensor) for each, tensor in named(tensors, name)]
    for _, tensor in found:
        check_tensor(tensor)
        transfer.check_reducible(tensor, shared)  # or an error, before anything is sent
    if inplace:
        check_shared([(str(tensor.device), tensor.data_ptr(), tensor.nbytes) for _, tensor in found])
    new = {each: tensor for each, tensor in found if each is not None}
    if new:
        transfer.declare_many(new, shared.group, shared.compression)
    results, starts = [], []
    for place, (each, tensor) in enumerate(found):
        data = tensor.detach()
        results.append(tensor if inplace else torch.empty_like(data))
        own = shared._replace(name=each, priority=shared.priority + len(found) - 1 - place)
        starts.append(partial(transfer.all_reduce, data, own, None if inplace else results[-1]))
        if inplace:
            arrays.note_change(tensor)
    begun = of_thread.begun
    assert begun is not None  # both callers are whole()
    if all(transfer.staged_from(tensor) is None for _, tensor in found):
        first = len(begun)
        start_all(starts, begun)
        return Together(begun[first:], lambda: like(tensors, results))
    return Together([one() for one in starts], lambda: like(tensors, results))

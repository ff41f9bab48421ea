# SPDX-License-Identifier: Apache-2.0
"""Operations of bps_rdma on torch tensors that are never staged.

push(), pull() and those of weights that servers keep take tensors on a device by a copy in CPU memory. The others take
CPU tensors, and say so; prepare() also takes CUDA tensors on the core's own route.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

import bps_rdma
from bps_rdma import Handle, PreparedOperation, argument_types, arrays
from bps_rdma.handle import PythonHandle
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import AnyCompression, ReduceName
from bps_rdma.positions import keywords_since
from bps_rdma.torch.arguments import full_name, in_core, on_cpu, ours, required_name
from bps_rdma.torch.host_copies import copied, read, target, written
from bps_rdma.torch.membership import AnyGroup


@keywords_since("name", "average", "priority", "group")
def push(
    tensor: torch.Tensor,
    name: str,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
) -> None:
    """Contributes a tensor to the next round of `name`, which pull() fetches; see bps_rdma.push()."""
    own = required_name(name)
    bps_rdma.push(read(tensor), own, average=average, op=op, priority=priority, group=ours(group), timeout=timeout)


@keywords_since("name", "average", "priority", "group")
def pull(
    tensor: torch.Tensor,
    name: str,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Fills a tensor with the result of the next round of `name`, and returns it; see bps_rdma.pull()."""
    own = required_name(name)
    host, finish = written(tensor)
    bps_rdma.pull(host, own, average=average, op=op, priority=priority, group=ours(group), timeout=timeout)
    return finish(host)


@keywords_since(
    "average", "name", "priority", "group", "out", "root", "op", "timeout", "compression", "exact", leading=2
)
def prepare(
    kind: Literal["push_pull", "reduce_scatter", "all_gather", "broadcast"],
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    root: int = 0,
    priority: int = 0,
    group: AnyGroup = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> PreparedOperation[torch.Tensor]:
    """Describes an operation that is started many times on the same tensors; see bps_rdma.prepare().

    CUDA tensors are taken with BPS_DEVICE_ROUTE, if the operation is not compressed.

    Autograd does not see that its calls change tensors.
    """
    return bps_rdma.prepare(
        kind,
        in_core(tensor, "prepare"),
        full_name(name),
        average=average,
        op=op,
        root=root,
        priority=priority,
        group=ours(group),
        out=None if out is None else in_core(out, "prepare"),
        timeout=timeout,
        compression=compression,
        exact=exact,
    )


@keywords_since("root", "name", "priority", "group", "timeout")
def store(
    tensor: torch.Tensor,
    name: str,
    *,
    root: int = 0,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Makes the servers keep the tensor of worker rank `root`; see bps_rdma.store()."""
    own, host = required_name(name), read(tensor)
    bps_rdma.store(host, own, root=root, priority=priority, group=ours(group), timeout=timeout)
    return copied(tensor, host)


@keywords_since("name", "priority", "group", "timeout")
def unstore(
    tensor: torch.Tensor, name: str, *, priority: int = 0, group: AnyGroup = None, timeout: float | None = None
) -> torch.Tensor:
    """Replaces a tensor by what the servers keep, which they keep no more; see bps_rdma.unstore()."""
    own = required_name(name)
    host, finish = written(tensor)
    bps_rdma.unstore(host, own, priority=priority, group=ours(group), timeout=timeout)
    return finish(host)


@keywords_since("name", "out", "staleness", "priority", "group", "timeout", "again")
def accumulate(
    delta: torch.Tensor,
    name: str,
    *,
    out: torch.Tensor | None = None,
    staleness: int | None = None,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
    again: bool = False,
) -> torch.Tensor:
    """Adds a tensor to the weights that the servers keep, and returns them; see bps_rdma.accumulate()."""
    own = required_name(name)
    host, finish = target(out, delta)
    result: torch.Tensor = bps_rdma.accumulate(
        read(delta),
        own,
        out=host,
        staleness=staleness,
        priority=priority,
        group=ours(group),
        timeout=timeout,
        again=again,
    )
    return finish(result)


@keywords_since("name", "out", "staleness", "priority", "group", "timeout", "again")
def accumulate_async(
    delta: torch.Tensor,
    name: str,
    *,
    out: torch.Tensor | None = None,
    staleness: int | None = None,
    priority: int = 0,
    group: AnyGroup = None,
    timeout: float | None = None,
    again: bool = False,
) -> Handle[torch.Tensor] | PythonHandle[torch.Tensor]:
    """Starts accumulate(); the handle gives the weights. Neither tensor may be used until then."""
    own = required_name(name)
    host, finish = target(out, delta)
    given = read(delta)
    if host is None and given is not delta:
        host = torch.empty_like(given)
    handle = bps_rdma.accumulate_async(
        given,
        own,
        out=host,
        staleness=staleness,
        priority=priority,
        group=ours(group),
        timeout=timeout,
        again=again,
    )
    if host is None or host is out:
        return handle
    return Together([handle], lambda: finish(host))


@keywords_since("name", "group", "timeout")
def feedback_state(
    like: torch.Tensor, name: str, *, group: AnyGroup = None, timeout: float | None = None
) -> dict[str, torch.Tensor]:
    """Returns the feedback of push_pulls of this name, of CPU tensors, as flat tensors; see bps_rdma.feedback_state().

    torch.save() takes it, and torch.load(weights_only=True).
    """
    own = required_name(name)
    state = bps_rdma.feedback_state(on_cpu(like, "feedback_state"), own, group=ours(group), timeout=timeout)
    return {key: torch.from_numpy(value) for key, value in state.items()}


@keywords_since("group", "timeout", leading=3, named=False)
def load_feedback_state(
    like: torch.Tensor,
    name: str,
    state: Mapping[str, torch.Tensor],
    *,
    group: AnyGroup = None,
    timeout: float | None = None,
) -> None:
    """Goes on from what feedback_state() gave; see bps_rdma.load_feedback_state()."""
    values = {key: value.detach().cpu().numpy() for key, value in state.items()}
    own = required_name(name)
    bps_rdma.load_feedback_state(on_cpu(like, "load_feedback_state"), own, values, group=ours(group), timeout=timeout)


def forget(tensor: torch.Tensor) -> None:
    """Tells the core that the memory of a CPU tensor was freed and allocated again; see bps_rdma.forget()."""
    bps_rdma.forget(on_cpu(tensor, "forget"))


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> torch.Tensor:
    """As zeros(), for programs that write to all of it before they read: what is in it is not promised."""
    return zeros(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any = "float32") -> torch.Tensor:
    """A CPU tensor of zeros that the other processes of this host can map, so that it is synchronised without copies.

    Args:
        shape: a whole number, or several.
        dtype: any that push_pull() takes: its name, or the dtype of torch or numpy.

    See bps_rdma.zeros() for what a forked process sees of it.

    Raises:
        InvalidArgumentError, InvalidTensorError, TransportError: as bps_rdma.zeros().
    """
    wanted = getattr(torch, arrays.core_dtype(dtype).name)
    extent = argument_types.extent_of(shape)
    memory = torch.from_numpy(bps_rdma.zeros(math.prod(extent) * wanted.itemsize, "uint8"))
    return memory.view(wanted).view(extent)


class ExactSum(bps_rdma.ExactSum):
    """Adds CPU tensors without rounding, first on each rank and then over the ranks, and rounds once.

    Args:
        like: a tensor of the shape and dtype that will be added, on the CPU.
        name, group: as for push_pull().

    See bps_rdma.ExactSum, which has the same methods.
    """

    @keywords_since("name", "group", leading=2)
    def __init__(self, like: torch.Tensor, name: str | None = None, *, group: AnyGroup = None) -> None:
        super().__init__(on_cpu(like, "ExactSum"), full_name(name), group=ours(group))

    def add(self, array: torch.Tensor) -> None:
        """Adds a CPU tensor of the same size and dtype on this rank; see bps_rdma.ExactSum.add()."""
        super().add(on_cpu(array, "ExactSum.add"))

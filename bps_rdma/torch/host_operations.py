# SPDX-License-Identifier: Apache-2.0
"""Operations of bps_rdma on torch tensors that are never staged.

They take tensors on a device by a copy in CPU memory, or with BPS_DEVICE_ROUTE themselves where the core alone carries
them. Only forget() takes CPU tensors alone, and prepare() those and CUDA tensors on the core's own route; they say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

import bps_rdma
from bps_rdma import Group, Handle, PreparedOperation, argument_types, arrays, job
from bps_rdma.handle import PythonHandle
from bps_rdma.operations.begun import whole
from bps_rdma.operations.declare import declared_compression
from bps_rdma.operations.messages import Together
from bps_rdma.operations.options import EXACT, EXACT_TO_ODD, ReduceName
from bps_rdma.operations.restored_feedback import SAVED_BY
from bps_rdma.positions import Unpack, keywords_of, keywords_since
from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import Moving, Reducing, for_core, full_name, in_core, on_cpu, ours, required_name
from bps_rdma.torch.checks import check_tensor
from bps_rdma.torch.host_copies import copied, read, target, written
from bps_rdma.torch.membership import AnyGroup


@keywords_since("name", "average", "priority", "group")
@keywords_of(bps_rdma.push, group="AnyGroup")
def push(
    tensor: torch.Tensor, name: str, *, average: bool = True, op: ReduceName | None = None, **options: Unpack[Moving]
) -> None:
    """Contributes a tensor to the next round of `name`, which pull() fetches; see bps_rdma.push()."""
    own = required_name(name)
    bps_rdma.push(read(tensor, by_core=True), own, average=average, op=op, **for_core(options))


@keywords_since("name", "average", "priority", "group")
@keywords_of(bps_rdma.pull, group="AnyGroup")
def pull(
    tensor: torch.Tensor, name: str, *, average: bool = True, op: ReduceName | None = None, **options: Unpack[Moving]
) -> torch.Tensor:
    """Fills a tensor with the result of the next round of `name`, and returns it; see bps_rdma.pull()."""
    own = required_name(name)
    host, finish = written(tensor, by_core=True)
    bps_rdma.pull(host, own, average=average, op=op, **for_core(options))
    return finish(host)


@keywords_since(
    "average", "name", "priority", "group", "out", "root", "op", "timeout", "compression", "exact", leading=2
)
@keywords_of(bps_rdma.prepare, group="AnyGroup")
def prepare(
    kind: Literal["push_pull", "reduce_scatter", "all_gather", "broadcast"],
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    **options: Unpack[Reducing],
) -> PreparedOperation[torch.Tensor]:
    """Describes an operation that is started many times on the same tensors; see bps_rdma.prepare().

    CUDA tensors are taken with BPS_DEVICE_ROUTE.

    Autograd does not see that its calls change tensors.
    """
    own = in_core(tensor, "prepare")
    into = None if out is None else in_core(out, "prepare")
    return bps_rdma.prepare(kind, own, full_name(name), root=root, out=into, **for_core(options))


@keywords_since("root", "name", "priority", "group", "timeout")
@keywords_of(bps_rdma.store, group="AnyGroup")
def store(tensor: torch.Tensor, name: str, *, root: int = 0, **options: Unpack[Moving]) -> torch.Tensor:
    """Makes the servers keep the tensor of worker rank `root`; see bps_rdma.store()."""
    own, host = required_name(name), read(tensor, by_core=True)
    bps_rdma.store(host, own, root=root, **for_core(options))
    return copied(tensor, host)


@keywords_since("name", "priority", "group", "timeout")
@keywords_of(bps_rdma.unstore, group="AnyGroup")
def unstore(tensor: torch.Tensor, name: str, **options: Unpack[Moving]) -> torch.Tensor:
    """Replaces a tensor by what the servers keep, which they keep no more; see bps_rdma.unstore()."""
    own = required_name(name)
    host, finish = written(tensor, by_core=True)
    bps_rdma.unstore(host, own, **for_core(options))
    return finish(host)


@keywords_since("name", "out", "staleness", "priority", "group", "timeout", "again")
@keywords_of(bps_rdma.accumulate, group="AnyGroup")
def accumulate(
    delta: torch.Tensor,
    name: str,
    *,
    out: torch.Tensor | None = None,
    staleness: int | None = None,
    again: bool = False,
    **options: Unpack[Moving],
) -> torch.Tensor:
    """Adds a tensor to the weights that the servers keep, and returns them; see bps_rdma.accumulate()."""
    own = required_name(name)
    host, finish = target(out, delta, by_core=True)
    given = read(delta, by_core=True)
    result: torch.Tensor = bps_rdma.accumulate(
        given, own, out=host, staleness=staleness, again=again, **for_core(options)
    )
    return finish(result)


@whole
@keywords_since("name", "out", "staleness", "priority", "group", "timeout", "again")
@keywords_of(bps_rdma.accumulate, group="AnyGroup")
def accumulate_async(
    delta: torch.Tensor,
    name: str,
    *,
    out: torch.Tensor | None = None,
    staleness: int | None = None,
    again: bool = False,
    **options: Unpack[Moving],
) -> Handle[torch.Tensor] | PythonHandle[torch.Tensor]:
    """Starts accumulate(); the handle gives the weights. Neither tensor may be used until then."""
    own = required_name(name)
    host, finish = target(out, delta, by_core=True)
    given = read(delta, by_core=True)
    if host is None and given is not delta:
        host = torch.empty_like(given)
    handle = bps_rdma.accumulate_async(given, own, out=host, staleness=staleness, again=again, **for_core(options))
    if host is None or host is out:
        return handle
    return Together([handle], lambda: finish(host))


@keywords_since("name", "group", "timeout")
def feedback_state(
    like: torch.Tensor, name: str, *, group: AnyGroup = None, timeout: float | None = None
) -> dict[str, torch.Tensor]:
    """Returns the feedback of push_pulls of this name as CPU tensors; see bps_rdma.feedback_state().

    torch.save() takes it, and torch.load(weights_only=True).
    """
    members = ours(group)
    found: dict[str, torch.Tensor] = {}
    for piece, part, host in _compressed(like, required_name(name), members):
        state = bps_rdma.feedback_state(host, piece, group=members, timeout=timeout)
        if SAVED_BY in state:
            found[SAVED_BY] = torch.from_numpy(state.pop(SAVED_BY))
        for key, value in state.items():
            whole = found.setdefault(key, torch.zeros(like.numel(), dtype=torch.float32, device="cpu"))
            whole[part] = torch.from_numpy(value)
    return found


@keywords_since("group", "timeout", leading=3, named=False)
def load_feedback_state(
    like: torch.Tensor,
    name: str,
    state: Mapping[str, torch.Tensor],
    *,
    average: bool = True,
    op: ReduceName | None = None,
    group: AnyGroup = None,
    timeout: float | None = None,
) -> None:
    """Goes on from what feedback_state() gave; see bps_rdma.load_feedback_state()."""
    members = ours(group)
    values = {key: value.detach().cpu().reshape(-1) for key, value in state.items()}
    for piece, part, host in _compressed(like, required_name(name), members):
        # One of another size goes as it is: the core says what is wrong with it.
        own = {
            key: (one[part] if key != SAVED_BY and len(one) == like.numel() else one).numpy()
            for key, one in values.items()
        }
        bps_rdma.load_feedback_state(host, piece, own, average=average, op=op, group=members, timeout=timeout)


def _compressed(like: torch.Tensor, name: str, group: Group | None) -> list[tuple[str, slice, torch.Tensor]]:
    """The compressed operations of which push_pulls of a tensor consist: name, part of the tensor, and CPU memory.

    A tensor that is staged is sent in pieces, of which a small one may travel as it is.
    """
    check_tensor(like)
    if transfer.staged_from(like) is None:
        return [(name, slice(None), written(like)[0])]
    running, members = job.current(), transfer.members_of(group)
    found, begin = [], 0
    for piece, elements in transfer.core_operations(name, like):
        wanted = declared_compression(running, members, piece, None)
        if running.compression(arrays.core_dtype(like.dtype), elements, wanted) not in ("", EXACT, EXACT_TO_ODD):
            host = torch.empty(elements, dtype=like.dtype, device="cpu")
            found.append((piece, slice(begin, begin + elements), host))
        begin += elements
    return found or [(name, slice(None), written(like)[0])]  # the core says what is wrong with it


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
    """Adds tensors without rounding, first on each rank and then over the ranks, and rounds once.

    Tensors on a device are added by a copy in CPU memory, where the sum is kept; the result is where `like` is.

    Args:
        like: a tensor of the shape and dtype that will be added.
        name, group: as for push_pull().

    See bps_rdma.ExactSum, which has the same methods.
    """

    @keywords_since("name", "group", leading=2)
    def __init__(self, like: torch.Tensor, name: str | None = None, *, group: AnyGroup = None) -> None:
        super().__init__(written(like)[0], full_name(name), group=ours(group))
        self._bring = target(None, like)[1]

    def add(self, array: torch.Tensor) -> None:
        """Adds a tensor of the same size and dtype on this rank; see bps_rdma.ExactSum.add()."""
        super().add(read(array))

    @keywords_since("average", "divisor", "priority", "timeout", named=False)
    def push_pull(
        self,
        *,
        average: bool = False,
        divisor: int | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """The sum of what all ranks have added, as a new tensor; see bps_rdma.ExactSum.push_pull()."""
        return self._bring(super().push_pull(average=average, divisor=divisor, priority=priority, timeout=timeout))

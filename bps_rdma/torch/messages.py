# SPDX-License-Identifier: Apache-2.0
"""Messages of torch tensors: send and recv, gather, scatter and all_to_all. Any dtype of torch; no gradient flows.

Tensors on a device go through a copy in CPU memory: the call waits for the device before it sends, and wait() copies
what has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import bps_rdma
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.handle import PythonHandle
from bps_rdma.operations.begun import whole
from bps_rdma.operations.messages import Together
from bps_rdma.positions import Unpack, keywords_of
from bps_rdma.torch import transfer
from bps_rdma.torch.arguments import Moving, for_core, full_name
from bps_rdma.torch.host_copies import read, target, written


@keywords_of(bps_rdma.send, group="AnyGroup")
def send(tensor: torch.Tensor, name: str | None = None, *, dst: int, tag: int = 0, **options: Unpack[Moving]) -> None:
    """Sends a contiguous tensor to worker rank `dst`, which receives it with recv(); see bps_rdma.send()."""
    bps_rdma.send(read(tensor), full_name(name), dst=dst, tag=tag, **for_core(options))


@whole
@keywords_of(bps_rdma.send, group="AnyGroup")
def send_async(
    tensor: torch.Tensor, name: str | None = None, *, dst: int, tag: int = 0, **options: Unpack[Moving]
) -> PythonHandle[torch.Tensor]:
    """Starts send(); the handle gives the tensor, which must not change until then."""
    handle = bps_rdma.send_async(read(tensor), full_name(name), dst=dst, tag=tag, **for_core(options))
    return handle if transfer.device_of(tensor) is None else Together([handle], lambda: tensor)


@keywords_of(bps_rdma.recv, group="AnyGroup")
def recv(
    tensor: torch.Tensor, name: str | None = None, *, src: int, tag: int = 0, **options: Unpack[Moving]
) -> torch.Tensor:
    """Fills a contiguous tensor with what worker rank `src` sends, and returns it; see bps_rdma.recv()."""
    host, finish = written(tensor)
    bps_rdma.recv(host, full_name(name), src=src, tag=tag, **for_core(options))
    return finish(host)


@whole
@keywords_of(bps_rdma.recv, group="AnyGroup")
def recv_async(
    tensor: torch.Tensor, name: str | None = None, *, src: int, tag: int = 0, **options: Unpack[Moving]
) -> PythonHandle[torch.Tensor]:
    """Starts recv(); the tensor must neither be read nor written until the handle is done."""
    host, finish = written(tensor)
    handle = bps_rdma.recv_async(host, full_name(name), src=src, tag=tag, **for_core(options))
    return handle if host is tensor else Together([handle], lambda: finish(host))


@keywords_of(bps_rdma.recv_any, group="AnyGroup")
def recv_any(tensor: torch.Tensor, name: str | None = None, *, tag: int = 0, **options: Unpack[Moving]) -> int:
    """Fills a contiguous tensor with what any rank sends first; returns that rank. See bps_rdma.recv_any()."""
    host, finish = written(tensor)
    found = bps_rdma.recv_any(host, full_name(name), tag=tag, **for_core(options))
    finish(host)
    return found


@keywords_of(bps_rdma.gather, group="AnyGroup")
def gather(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    root: int = 0,
    uneven: bool = False,
    out: torch.Tensor | None = None,
    **options: Unpack[Moving],
) -> torch.Tensor | None:
    """Gathers every rank's contiguous tensor on worker rank `root`; the others get None. See bps_rdma.gather()."""
    host, finish = target(out, tensor)
    whole = bps_rdma.gather(read(tensor), full_name(name), root=root, uneven=uneven, out=host, **for_core(options))
    return None if whole is None else finish(whole)


@whole
@keywords_of(bps_rdma.gather, group="AnyGroup")
def gather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    root: int = 0,
    uneven: bool = False,
    out: torch.Tensor | None = None,
    **options: Unpack[Moving],
) -> PythonHandle[torch.Tensor | None]:
    """Starts gather(); the handle gives the whole, or None. No tensor may be changed until then."""
    host, finish = target(out, tensor)
    handle = bps_rdma.gather_async(
        read(tensor), full_name(name), root=root, uneven=uneven, out=host, **for_core(options)
    )

    def result() -> torch.Tensor | None:
        whole = handle.wait()
        return None if whole is None else finish(whole)

    return Together([handle], result)


@keywords_of(bps_rdma.scatter, group="AnyGroup")
def scatter(
    tensor: torch.Tensor | None,
    name: str | None = None,
    *,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor,
    **options: Unpack[Moving],
) -> torch.Tensor:
    """Gives every rank a part of the contiguous tensor of worker rank `root`, in `out`; see bps_rdma.scatter()."""
    host, finish = written(out)
    bps_rdma.scatter(_read_at(root, tensor), full_name(name), root=root, sizes=sizes, out=host, **for_core(options))
    return finish(host)


@whole
@keywords_of(bps_rdma.scatter, group="AnyGroup")
def scatter_async(
    tensor: torch.Tensor | None,
    name: str | None = None,
    *,
    root: int = 0,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor,
    **options: Unpack[Moving],
) -> PythonHandle[torch.Tensor]:
    """Starts scatter(); the handle gives `out`. No tensor may be changed until then."""
    host, finish = written(out)
    handle = bps_rdma.scatter_async(
        _read_at(root, tensor), full_name(name), root=root, sizes=sizes, out=host, **for_core(options)
    )
    return handle if host is out else Together([handle], lambda: finish(host))


@keywords_of(bps_rdma.all_to_all, group="AnyGroup")
def all_to_all(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    **options: Unpack[Moving],
) -> torch.Tensor:
    """Every rank gives a part of its contiguous tensor to every rank; see bps_rdma.all_to_all()."""
    host, finish = target(out, tensor)
    whole = bps_rdma.all_to_all(
        read(tensor), full_name(name), sizes=sizes, out_sizes=out_sizes, out=host, **for_core(options)
    )
    return finish(whole)


@whole
@keywords_of(bps_rdma.all_to_all, group="AnyGroup")
def all_to_all_async(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    **options: Unpack[Moving],
) -> PythonHandle[torch.Tensor]:
    """Starts all_to_all(); the handle gives the result. No tensor may be changed until then."""
    host, finish = target(out, tensor)
    handle = bps_rdma.all_to_all_async(
        read(tensor), full_name(name), sizes=sizes, out_sizes=out_sizes, out=host, **for_core(options)
    )
    return Together([handle], lambda: finish(handle.wait()))


# ---- Tensors on a device


def _read_at(root: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if root != bps_rdma.rank():
        return None
    if tensor is None:
        raise InvalidArgumentError("the root scatters nothing", "pass the tensor on the root")
    return read(tensor)

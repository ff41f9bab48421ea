# SPDX-License-Identifier: Apache-2.0
"""Gathers bytes of any length from all ranks, and checks that all ranks are about to make the same call.

An error on one rank is reported to all of them, so that none waits for a rank that has given up.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import InvalidArgumentError, MismatchError
from bps_rdma.torch.transfer import device_of, members_of
from bps_rdma.torch.transfer.flat_bytes import flat_bytes

_SOME = 4096  # elements
_OK, _FAILED = b"\0", b"\1"  # the first byte of a message


def all_gather_bytes(
    write: Callable[[io.BytesIO], None] | None, name: str, group: Group | None
) -> list[memoryview | None]:
    """The messages of all ranks of the group, in the order of its ranks; None for ranks without a message.

    Args:
        write: fills this rank's message; None: this rank has none.
        name: the same on all ranks.
        group: who takes part; None: all workers.

    Raises:
        InvalidArgumentError: `write` raised an error on some rank; raised on all ranks, and chained to its cause there.
    """
    members = members_of(group)
    message, cause = io.BytesIO(), None
    if write is not None:
        message.write(_OK)
        try:
            write(message)
        except Exception as error:
            cause, message = error, io.BytesIO(_FAILED + f"{type(error).__name__}: {error}".encode())
            message.seek(0, io.SEEK_END)
    sizes = bps_rdma.all_gather(np.array([message.tell()], np.int64), name=f"{name}.sizes", group=members)
    messages = _broadcast_all(message, [int(size) for size in sizes], name, members)
    for rank, text in zip(members.ranks, messages, strict=True):
        if text is not None and bytes(text[:1]) == _FAILED:
            failure = InvalidArgumentError(
                f"worker {rank} failed to write its message: {bytes(text[1:]).decode()}", "correct it on that worker"
            )
            raise failure from (cause if rank == bps_rdma.rank() else None)
    return [None if text is None else text[1:] for text in messages]


def _broadcast_all(message: io.BytesIO, sizes: list[int], name: str, members: Group) -> list[memoryview | None]:
    buffers: list[np.ndarray[Any, Any] | None] = []
    for rank, size in zip(members.ranks, sizes, strict=True):
        if size and rank == bps_rdma.rank():
            message.write(bytes(_padded(size) - size))
            buffers.append(np.frombuffer(message.getbuffer(), np.uint8))
        else:
            buffers.append(np.empty(_padded(size), np.uint8) if size else None)
    handles = [
        bps_rdma.broadcast_async(buffer, root=rank, name=f"{name}.{rank}.{buffer.size}", group=members)
        for rank, buffer in zip(members.ranks, buffers, strict=True)
        if buffer is not None
    ]
    bps_rdma.wait(handles)
    return [None if buffer is None else buffer.data[:size] for buffer, size in zip(buffers, sizes, strict=True)]


def _padded(size: int) -> int:
    """`size` and up to an eighth more: a name has a fixed size, and so only few names are needed."""
    step = max(64, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


def check_alike(
    lines: Sequence[str],
    name: str,
    group: Group | None,
    failure: Exception | None = None,
    places: Sequence[str] = (),
) -> bool:
    """Checks that all ranks are about to make the same call, before any of them starts. Costs one small all_gather.

    Args:
        lines: describe the call of this rank, for instance one line for each tensor.
        name: of the call, for messages; the same on all ranks.
        group: who takes part; None: all workers.
        failure: why this rank cannot make the call: raised here, and reported to the others.
        places: see place_of(); may differ between ranks.

    Returns:
        Whether `places` are the same on all ranks.

    Raises:
        MismatchError: the lines of ranks differ; names the first that do. InvalidArgumentError: another rank failed.
    """
    members = members_of(group)
    own = np.frombuffer(_digest(lines) + _digest(places), np.int64).copy()
    if failure is not None:
        own[:4] = 0
    everybody = bps_rdma.all_gather(own, name=f"{name}.digest", group=members).reshape(members.size, 8)
    calls = everybody[:, :4]
    if calls.any() and (calls == calls[0]).all():
        return bool((everybody == everybody[0]).all())

    def write(message: io.BytesIO) -> None:
        message.write(json.dumps([None if failure is None else str(failure), list(lines)]).encode())

    reports = [json.loads(bytes(text or b"")) for text in all_gather_bytes(write, f"{name}.lines", members)]
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback keeps this frame, and what the script has in those that called it
    for rank, (reason, _) in zip(members.ranks, reports, strict=True):
        if reason is not None:
            raise InvalidArgumentError(f"{name}: worker {rank} cannot take part: {reason}", "correct it on that worker")
    first = reports[0][1]
    for rank, (_, theirs) in zip(members.ranks, reports, strict=True):
        for ours, other in itertools.zip_longest(first, theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"{name}: worker {members.ranks[0]} has {ours} where worker {rank} has {other}",
                    "make the same model and the same calls with the same settings on all ranks",
                )
    return False


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(lines).encode()).digest()


def place_of(tensor: torch.Tensor) -> str:
    """The way in which broadcast_tensors() would send a tensor. If ranks differ, all send it from CPU memory."""
    try:
        return "in place" if device_of(tensor) is None else "staged"
    except InvalidArgumentError:
        return "copied"


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """Describes a tensor for check_alike()."""
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def digest_of(tensor: torch.Tensor) -> str:
    """Describes all values of a tensor for check_alike()."""
    values: Any = flat_bytes(tensor.detach().cpu().contiguous()).numpy()
    return f"values {hashlib.sha256(values).hexdigest()[:16]}"


def digest_of_some(tensor: torch.Tensor) -> str:
    """The same of elements from all of it: in another state of the training most of them differ."""
    return digest_of(tensor.detach().contiguous().view(-1)[:: max(1, tensor.numel() // _SOME)])


def optimizer_lines(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describes an optimizer for check_alike(): its class, and the parameters of each group."""
    lines = [type(optimizer).__name__]
    for number, group in enumerate(optimizer.param_groups):
        lines += [
            tensor_line(f"group {number} parameter {place}", param) for place, param in enumerate(group["params"])
        ]
    return lines

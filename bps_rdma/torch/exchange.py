"""What ranks tell each other besides tensors: bytes of any length, and whether they are about to do the same.

An error of one rank is told to all of them, so that nobody waits for a rank that has given up.
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
from bps_rdma import Group, job
from bps_rdma.errors import InvalidArgumentError, MismatchError

_OK, _FAILED = b"\0", b"\1"  # the first byte of a message


def members_of(group: Group | None) -> Group:
    """The group itself, or the world for None."""
    return job.group_of(job.current(), group)


def exchange(write: Callable[[io.BytesIO], None] | None, name: str, group: Group | None) -> list[memoryview | None]:
    """What every rank of the group writes, in the order of its ranks; None for those that write nothing.

    Args:
        write: fills this rank's message; None: this rank has none.
        name: the same on all ranks.

    Raises:
        InvalidArgumentError: `write` raised, on whatever rank: told to all, and chained to its cause on that one.
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
                f"worker {rank} has nothing to send: {bytes(text[1:]).decode()}", "correct that on the rank it names"
            )
            raise failure from (cause if rank == bps_rdma.rank() else None)
    return [None if text is None else text[1:] for text in messages]


def _broadcast_all(message: io.BytesIO, sizes: list[int], name: str, members: Group) -> list[memoryview | None]:
    buffers: list[np.ndarray[Any, Any] | None] = []
    for rank, size in zip(members.ranks, sizes, strict=True):
        if size and rank == bps_rdma.rank():
            message.write(bytes(_room(size) - size))
            buffers.append(np.frombuffer(message.getbuffer(), np.uint8))
        else:
            buffers.append(np.empty(_room(size), np.uint8) if size else None)
    handles = [
        bps_rdma.broadcast_async(buffer, root=rank, name=f"{name}.{rank}.{buffer.size}", group=members)
        for rank, buffer in zip(members.ranks, buffers, strict=True)
        if buffer is not None
    ]
    bps_rdma.wait(handles)
    return [None if buffer is None else buffer.data[:size] for buffer, size in zip(buffers, sizes, strict=True)]


def _room(size: int) -> int:
    """`size` and up to an eighth more: names have a fixed size, and there are then few of them."""
    step = max(64, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


def check_alike(lines: Sequence[str], name: str, group: Group | None, failure: Exception | None = None) -> None:
    """Makes sure that all ranks are about to do the same, before any of them starts. Costs one small all_gather.

    Args:
        lines: what this rank is about to do, one line for each thing.
        name: what it is called, for people; the same on all ranks.
        failure: why this rank cannot: raised here, and told to the others.

    Raises:
        MismatchError: the lines of ranks differ; names the first that do. InvalidArgumentError: another rank cannot.
    """
    members = members_of(group)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = np.frombuffer(digest, np.int64) if failure is None else np.zeros(4, np.int64)
    everybody = bps_rdma.all_gather(own, name=f"{name}.digest", group=members).reshape(members.size, 4)
    if everybody.any() and (everybody == everybody[0]).all():
        return

    def tell(message: io.BytesIO) -> None:
        message.write(json.dumps([None if failure is None else str(failure), list(lines)]).encode())

    told = [json.loads(bytes(text or b"")) for text in exchange(tell, f"{name}.lines", members)]
    if failure is not None:
        raise failure
    for rank, (reason, _) in zip(members.ranks, told, strict=True):
        if reason is not None:
            raise InvalidArgumentError(f"{name}: worker {rank} cannot take part: {reason}", "correct it there")
    first = told[0][1]
    for rank, (_, theirs) in zip(members.ranks, told, strict=True):
        for ours, other in itertools.zip_longest(first, theirs, fillvalue="nothing more"):
            if ours != other:
                raise MismatchError(
                    f"{name}: worker {members.ranks[0]} has {ours} where worker {rank} has {other}",
                    "make the same model and the same calls on all ranks",
                )


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """What check_alike() compares of a tensor."""
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def optimizer_lines(optimizer: torch.optim.Optimizer) -> list[str]:
    """What check_alike() compares of an optimizer: its class, and the parameters of each group."""
    lines = [type(optimizer).__name__]
    for number, group in enumerate(optimizer.param_groups):
        lines += [
            tensor_line(f"group {number} parameter {place}", param) for place, param in enumerate(group["params"])
        ]
    return lines

# SPDX-License-Identifier: Apache-2.0
"""Keeps a module's buffers, such as the running statistics of batch normalisation, the same on all ranks."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import MismatchError
from bps_rdma.operations import OperationOptions
from bps_rdma.torch import transfer
from bps_rdma.torch.returned import others_moved


class BufferBroadcast:
    """Broadcasts the buffers of one rank: one operation per dtype and device, through one block of memory.

    Args:
        module: whose buffers; looked up anew each time, since modules replace them.
        prefix: of all names.
        group: who takes part, the first of them gives its buffers; None: all workers.
    """

    def __init__(self, module: torch.nn.Module, prefix: str, group: Group | None) -> None:
        self._module = module
        self._prefix = prefix
        self._group = group
        self._blocks: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}
        self._layout: list[tuple[torch.dtype, int]] = []  # dtype and size of all buffers
        self._own = np.zeros(3, np.int64)  # the layout as other ranks are told of it

    def run(self, root: int | None = None) -> None:
        """Overwrites all buffers by those of the root. Every rank of the group calls it.

        Args:
            root: the rank; None: the first one of the group.

        Raises:
            MismatchError: the buffers of ranks differ in number, dtype or size.
        """
        if root is None:
            root = self._group.ranks[0] if self._group else 0  # the first rank in the view of now
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self._module.buffers():
            # Two forwards may come before one backward, as of a GAN's critic: autograd, which has kept the buffer of
            # the first one, must not take this for a change that the module has made. It counts no changes of `data`.
            alike.setdefault((buffer.dtype, buffer.device), []).append(buffer.data)
        if alike:
            self._check([buffer for buffers in alike.values() for buffer in buffers])
        for number, ((dtype, device), buffers) in enumerate(alike.items()):
            count = sum(buffer.numel() for buffer in buffers)
            block = self._blocks.get((dtype, device, count))
            if block is None:
                block = transfer.zeros_beside(buffers[0], count * dtype.itemsize, torch.uint8)
                self._blocks[dtype, device, count] = block
            typed = block.view(dtype)
            sends = bps_rdma.rank() == root
            if sends:
                torch.cat([buffer.reshape(-1) for buffer in buffers], out=typed)
            # They travel as bytes, because any dtype can be sent that way.
            name = f"{self._prefix}.buffers.{number}.{dtype}.{count}"
            transfer.broadcast(block, root, OperationOptions(name=name, group=self._group, awaited=True)).wait()
            if not sends:
                parts = typed.split([buffer.numel() for buffer in buffers])  # type: ignore[no-untyped-call]
                shaped = [part.view(buffer.shape) for buffer, part in zip(buffers, parts, strict=True)]
                torch._foreach_copy_(buffers, shaped)
        others_moved(lambda: sum(buffer.nbytes for buffers in alike.values() for buffer in buffers))

    def _check(self, buffers: list[torch.Tensor]) -> None:
        """Checks that all ranks have the same buffers: with others, a rank would wait under other names."""
        layout = [(buffer.dtype, buffer.numel()) for buffer in buffers]
        if layout != self._layout:
            digest = int.from_bytes(hashlib.sha256(repr(layout).encode()).digest()[:7], "little")
            self._own[:] = digest, len(layout), sum(count for _, count in layout)
            self._layout = layout
        name = f"{self._prefix}.buffers"
        found = bps_rdma.all_gather(self._own, name=name, group=self._group).reshape(-1, self._own.size)
        for place, (theirs, number, elements) in enumerate(found):
            if theirs != found[0, 0]:
                ranks = self._group.ranks if self._group else range(len(found))
                raise MismatchError(
                    f"the buffers of the module differ: worker {ranks[0]} has {found[0, 1]} of {found[0, 2]} elements "
                    f"together, worker {ranks[place]} has {number} of {elements}",
                    "give them the same dtypes and sizes on all ranks, or pass broadcast_buffers=False",
                )

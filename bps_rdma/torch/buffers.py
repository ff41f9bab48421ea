"""Keeps a module's buffers, such as the running statistics of batch normalisation, the same on all ranks."""

from __future__ import annotations

import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.torch.units import shared_tensor


class BufferSpreader:
    """Spreads the buffers of one rank to the others: one message per dtype, through a block that all processes map.

    Args:
        module: whose buffers; looked up anew each time, since modules replace them.
        root: the worker rank whose buffers count.
        prefix: in front of names.
        group: who takes part; None: all workers.
    """

    def __init__(self, module: torch.nn.Module, root: int, prefix: str, group: Group | None) -> None:
        self._module = module
        self._root = root
        self._prefix = prefix
        self._group = group
        self._blocks: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def spread(self) -> None:
        """Makes all buffers those of the root. Every rank of the group calls it."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
        for dtype, buffers in by_dtype.items():
            count = sum(buffer.numel() for buffer in buffers)
            if (dtype, count) not in self._blocks:
                self._blocks[dtype, count] = shared_tensor(count * dtype.itemsize, torch.uint8)
            block = self._blocks[dtype, count]
            typed = block.view(dtype)
            sender = bps_rdma.rank() == self._root
            if sender:
                torch.cat([buffer.reshape(-1) for buffer in buffers], out=typed)
            # As bytes: any dtype can travel that way.
            name = f"{self._prefix}.buffers.{dtype}.{count}"
            bps_rdma.broadcast(block, self._root, name, group=self._group)
            if not sender:
                parts = typed.split([buffer.numel() for buffer in buffers])  # type: ignore[no-untyped-call]
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape))

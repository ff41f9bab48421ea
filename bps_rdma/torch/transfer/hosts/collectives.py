# SPDX-License-Identifier: Apache-2.0
"""The collectives of the GPUs of one host, by a backend of torch: NCCL. They run in the caller's stream, in order."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bps_rdma import Group, job
from bps_rdma.errors import TransportError
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.torch.transfer.device import Device

_GRACE = 60.0  # seconds by which NCCL is more patient than others: when it loses its patience, it ends the process
_PATH = struct.Struct("32s32s")  # that of a file, and the file's own name


class HostCollectives:
    """Those of some ranks of a host. They make it together, and find each other by a file that only their user reads.

    The file is in the memory of the first of them: it is gone when that process is, however it ends.

    Args:
        device: that of this rank.
        peers: the ranks.
        name: of what they do for that.

    Raises:
        TransportError: the backend could not be made.
    """

    def __init__(self, device: Device, peers: Group, name: str) -> None:
        self._backend: Any = None
        own = secrets.token_hex(16)
        self._file = os.memfd_create(own, os.MFD_CLOEXEC) if peers.rank == 0 else -1
        told = bytearray(_PATH.pack(f"/proc/{os.getpid()}/fd/{self._file}".encode(), own.encode()))
        options = OperationOptions(name=f"{name}, store", group=peers, awaited=True)
        start.broadcast(np.frombuffer(told, np.uint8), peers.ranks[0], options).wait()
        path, own = (text.rstrip(b"\0").decode() for text in _PATH.unpack(told))  # those of the first one count
        stores: Any = dist
        try:
            if peers.rank != 0:
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            here = Path(f"/proc/self/fd/{self._file}")
            if own not in here.readlink().name:  # elsewhere another process has this number
                raise OSError(f"{path} is another file")
            store = stores.FileStore(str(here), peers.size)
            self._backend = device.backend(store, peers.rank, peers.size, job.current().process.timeout_s + _GRACE)
        except (OSError, RuntimeError, ValueError) as error:
            self.close()
            raise TransportError(
                f"the GPUs of this host cannot sum: {error}",
                "let the ranks of a host see each other's processes in /proc, as one user, or set BPS_GPU_HOST_SUM=0",
            ) from error

    # Those of NCCL let the stream wait, and not the host.

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: ReduceOp) -> None:
        """This rank's part of the reduction of `whole`, by a sum, the smallest or the largest."""
        c10d: Any = dist.distributed_c10d
        options = c10d.ReduceScatterOptions()
        options.reduceOp = getattr(c10d.ReduceOp, op.name.upper())
        self._backend._reduce_scatter_base(part, whole, options).wait()

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """All parts, one after the other. As bytes: NCCL does not know all dtypes."""
        c10d: Any = dist.distributed_c10d
        self._backend._allgather_base(whole.view(torch.uint8), part.view(torch.uint8), c10d.AllgatherOptions()).wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replaces the tensor by that of the peer with this number. As bytes."""
        c10d: Any = dist.distributed_c10d
        options = c10d.BroadcastOptions()
        options.rootRank = root
        self._backend.broadcast([tensor.view(torch.uint8)], options).wait()

    def abort(self) -> None:
        """Ends what is in progress, with errors, and what it waits for. Further calls fail."""
        self._call("abort")

    def shut_down(self) -> None:
        """Ends them, when nothing is in progress here. It may wait for other ranks, which may be lost."""
        self._call("shutdown")

    def _call(self, name: str) -> None:
        end = getattr(self._backend, name, None) or getattr(self._backend, "_shutdown", None)  # before torch 2.6
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end()

    def close(self) -> None:
        """Takes the file away."""
        self._backend = None  # its store opens the file by its number each time, the last time when it ends
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

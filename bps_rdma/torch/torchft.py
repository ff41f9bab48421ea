# SPDX-License-Identifier: Apache-2.0
"""A process group for torchft, which is installed beside bps_rdma: one more job for each quorum.

torchft tells each replica group whom it has in the next quorum, and gives it a store to meet them. This leaves the job
of the last quorum without waiting, since its members may be dead, and joins one with the new members.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

import bps_rdma
from bps_rdma.torch import membership
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.process_group import BpsProcessGroup


class ProcessGroupBps(ProcessGroupWrapper):  # type: ignore[misc]
    """For torchft.Manager(pg=...), on the CPU. One per process: a process is in one job of bps_rdma at a time."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        bps_rdma.shutdown(timeout=0)
        membership.init_from_store(store, rank, world_size, {"timeout": self._timeout.total_seconds()})
        options = SimpleNamespace(
            store=store, group_rank=rank, group_size=world_size, timeout=self._timeout, global_ranks_in_group=[]
        )
        return BpsProcessGroup(options, Collectives(rank, range(world_size), None, "torchft"), leaves=True)

    def abort(self, errored: bool = True) -> None:
        """Ends what is in progress, and leaves the job."""
        bps_rdma.shutdown(timeout=0)
        super().abort(errored)

    def getBackendName(self) -> str:  # noqa: N802
        """The name that torchft shows."""
        return "torchft-bps"

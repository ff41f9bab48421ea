# SPDX-License-Identifier: Apache-2.0
"""The names of byteps.torch.parallel: DistributedDataParallel, and what BytePS's scripts use beside it."""

from bps_rdma import local_rank, local_size, poll, rank, shutdown, size, synchronize
from bps_rdma.torch.compression import Compression
from bps_rdma.torch.ddp import DistributedDataParallel
from bps_rdma.torch.membership import init, resume, suspend
from bps_rdma.torch.ops import (
    byteps_torch_set_num_grads,
    declare,
)
from bps_rdma.torch.ops import push_pull_async_inplace as byteps_push_pull
from bps_rdma.torch.ops import push_pull_group_sync_inplace as byteps_push_pull_group

__all__ = [
    "Compression", "DistributedDataParallel", "byteps_push_pull", "byteps_push_pull_group",
    "byteps_torch_set_num_grads", "declare", "init", "local_rank", "local_size", "poll", "rank", "resume", "shutdown",
    "size", "suspend", "synchronize",
]  # fmt: skip

"""bps_rdma for PyTorch, under BytePS's names.

import bps_rdma.torch as bps

bps.init()
model = bps.DistributedDataParallel(model)  # then train as in one process
"""

from bps_rdma import (
    Group,
    Handle,
    barrier,
    get_pushpull_speed,
    is_initialized,
    local_rank,
    local_size,
    new_group,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
)
from bps_rdma.torch.compression import Compression
from bps_rdma.torch.ops import (
    byteps_torch_set_num_grads,
    declare,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_group_sync_inplace,
    push_pull_inplace,
)
from bps_rdma.torch.start import init

byteps_push_pull = push_pull_async_inplace  # BytePS's alias

__all__ = [
    "Compression",
    "Group",
    "Handle",
    "barrier",
    "byteps_push_pull",
    "byteps_torch_set_num_grads",
    "declare",
    "get_pushpull_speed",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "new_group",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

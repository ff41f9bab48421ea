# SPDX-License-Identifier: Apache-2.0
"""bps_rdma for PyTorch, under BytePS's names.

import bps_rdma.torch as bps

bps.init()
model = bps.DistributedDataParallel(model)  # then train as in one process
"""

from bps_rdma import (
    Group,
    Handle,
    RoundAbortedError,
    barrier,
    commit,
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
from bps_rdma.torch import backend as _backend
from bps_rdma.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from bps_rdma.torch.compression import Compression
from bps_rdma.torch.cross_barrier import CrossBarrier
from bps_rdma.torch.ddp import DistributedDataParallel
from bps_rdma.torch.ddp_comm_hook import ddp_comm_hook
from bps_rdma.torch.diloco import DiLoCo, LocalSGD
from bps_rdma.torch.membership import init, resume, suspend
from bps_rdma.torch.ops import (
    byteps_torch_set_num_grads,
    declare,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_group_sync_inplace,
    push_pull_inplace,
)
from bps_rdma.torch.optimizer import DistributedOptimizer
from bps_rdma.torch.sampler import ElasticSampler
from bps_rdma.torch.sharded import ShardedOptimizer
from bps_rdma.torch.training_state import TrainingState
from bps_rdma.torch.untraced import leave_untraced as _leave_untraced

byteps_push_pull = push_pull_async_inplace  # BytePS's alias
_backend.register()  # init_process_group("bps")
_leave_untraced("bps_rdma")  # by torch.compile

__all__ = [
    "Compression",
    "CrossBarrier",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticSampler",
    "Group",
    "Handle",
    "LocalSGD",
    "RoundAbortedError",
    "ShardedOptimizer",
    "TrainingState",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "byteps_torch_set_num_grads",
    "commit",
    "ddp_comm_hook",
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
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]

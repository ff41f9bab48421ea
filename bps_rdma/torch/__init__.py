# SPDX-License-Identifier: Apache-2.0
"""bps_rdma for PyTorch: all of bps_rdma for tensors, under the same names and keywords, and what training needs.

import bps_rdma.torch as bps

bps.init()
model = bps.DistributedDataParallel(model)  # then train as in one process
"""

from bps_rdma import (
    AuthenticationError,
    BFloat16,
    BpsError,
    Compression,
    DeadlineError,
    Dithering,
    Float16,
    Fp8,
    Group,
    Handle,
    Int4,
    Int8,
    InternalError,
    InvalidArgumentError,
    InvalidTensorError,
    MismatchError,
    MxFp8,
    NotInitializedError,
    OneBit,
    PeerLostError,
    PortTakenError,
    PreparedOperation,
    RandomK,
    RefusedError,
    RoundAbortedError,
    Settings,
    SettingValue,
    TopK,
    TransportError,
    Uncompressed,
    UnknownHandleError,
    UnreachableError,
    VersionError,
    __version__,
    config,
    dump,
    get_pushpull_speed,
    is_initialized,
    local_rank,
    local_size,
    metrics,
    new_group,
    poll,
    rank,
    shard_bounds,
    shutdown,
    size,
    synchronize,
    wait,
)
from bps_rdma.torch import backend as _backend
from bps_rdma.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from bps_rdma.torch.collectives import (
    all_gather,
    all_gather_async,
    broadcast,
    broadcast_async,
    reduce_scatter,
    reduce_scatter_async,
)
from bps_rdma.torch.cross_barrier import CrossBarrier
from bps_rdma.torch.ddp import DistributedDataParallel
from bps_rdma.torch.ddp_comm_hook import HookState, ddp_comm_hook
from bps_rdma.torch.diloco import DiLoCo, LocalSGD
from bps_rdma.torch.host_operations import (
    ExactSum,
    accumulate,
    accumulate_async,
    empty,
    feedback_state,
    forget,
    load_feedback_state,
    prepare,
    pull,
    push,
    store,
    unstore,
    zeros,
)
from bps_rdma.torch.many import push_pull_many, push_pull_many_async
from bps_rdma.torch.membership import barrier, commit, init, resume, suspend
from bps_rdma.torch.messages import (
    all_to_all,
    all_to_all_async,
    gather,
    gather_async,
    recv,
    recv_any,
    recv_async,
    scatter,
    scatter_async,
    send,
    send_async,
)
from bps_rdma.torch.ops import (
    byteps_torch_set_num_grads,
    declare,
    declare_many,
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
    "AuthenticationError", "BFloat16", "BpsError", "Compression", "CrossBarrier", "DeadlineError", "DiLoCo",
    "DistributedDataParallel", "DistributedOptimizer", "Dithering", "ElasticSampler", "ExactSum", "Float16", "Fp8",
    "Group", "Handle", "HookState", "Int4", "Int8", "InternalError", "InvalidArgumentError", "InvalidTensorError",
    "LocalSGD", "MismatchError", "MxFp8", "NotInitializedError", "OneBit", "PeerLostError", "PortTakenError",
    "PreparedOperation", "RandomK", "RefusedError", "RoundAbortedError", "SettingValue", "Settings", "ShardedOptimizer",
    "TopK", "TrainingState", "TransportError", "Uncompressed", "UnknownHandleError", "UnreachableError", "VersionError",
    "__version__", "accumulate", "accumulate_async", "all_gather", "all_gather_async", "all_to_all", "all_to_all_async",
    "barrier", "broadcast", "broadcast_async", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
    "byteps_push_pull", "byteps_torch_set_num_grads", "commit", "config", "ddp_comm_hook", "declare", "declare_many",
    "dump", "empty", "feedback_state", "forget", "gather", "gather_async", "get_pushpull_speed", "init",
    "is_initialized", "load_feedback_state", "local_rank", "local_size", "metrics", "new_group", "poll", "prepare",
    "pull", "push", "push_pull", "push_pull_async", "push_pull_async_inplace", "push_pull_group_sync_inplace",
    "push_pull_inplace", "push_pull_many", "push_pull_many_async", "rank", "recv", "recv_any", "recv_async",
    "reduce_scatter", "reduce_scatter_async", "resume", "scatter", "scatter_async", "send", "send_async",
    "shard_bounds", "shutdown", "size", "store", "suspend", "synchronize", "unstore", "wait", "zeros",
]  # fmt: skip

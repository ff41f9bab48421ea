# SPDX-License-Identifier: Apache-2.0
"""Gradient push/pull over RDMA, shared memory and TCP.

import bps_rdma as bps

bps.init()
gradient = bps.zeros((1024, 1024), "float32")  # or any numpy array or CPU torch tensor
bps.push_pull_inplace(gradient, name="layer1.weight")  # now the mean over all workers
bps.shutdown()
"""

try:
    from bps_rdma._core import __version__
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__path__[0]} is the source of bps_rdma, without its native part: "
        "start Python in another folder, where the installed package is found, or install it: pip install ."
    ) from error
from bps_rdma.agreement import barrier, commit, new_group
from bps_rdma.arrays import empty, zeros
from bps_rdma.compression import (
    BFloat16,
    Compression,
    Dithering,
    Float16,
    Fp8,
    Int4,
    Int8,
    MxFp8,
    OneBit,
    RandomK,
    TopK,
    Uncompressed,
)
from bps_rdma.counters import dump, get_pushpull_speed, metrics
from bps_rdma.errors import (
    AuthenticationError,
    BpsError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    InvalidTensorError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    PortTakenError,
    RefusedError,
    RoundAbortedError,
    TransportError,
    UnknownHandleError,
    UnreachableError,
    VersionError,
)
from bps_rdma.exact import ExactSum
from bps_rdma.group import Group
from bps_rdma.handle import Handle, PreparedOperation, poll, synchronize, wait
from bps_rdma.job import config, init, is_initialized, local_rank, local_size, rank, shutdown, size
from bps_rdma.operations.collectives import (
    all_gather,
    all_gather_async,
    broadcast,
    broadcast_async,
    reduce_scatter,
    reduce_scatter_async,
)
from bps_rdma.operations.declare import declare, declare_many, forget
from bps_rdma.operations.exchanges import all_to_all, all_to_all_async, gather, gather_async, scatter, scatter_async
from bps_rdma.operations.feedback import feedback_state, load_feedback_state
from bps_rdma.operations.many import push_pull_many, push_pull_many_async
from bps_rdma.operations.prepare import prepare
from bps_rdma.operations.push_pull import (
    pull,
    push,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
)
from bps_rdma.operations.send_recv import recv, recv_any, recv_async, send, send_async
from bps_rdma.operations.start import shard_bounds
from bps_rdma.operations.weights import accumulate, accumulate_async, store, unstore
from bps_rdma.setting_types import Settings
from bps_rdma.settings import SettingValue

__all__ = [
    "AuthenticationError", "BFloat16", "BpsError", "Compression", "DeadlineError", "Dithering", "ExactSum", "Float16",
    "Fp8", "Group", "Handle", "Int4", "Int8", "InternalError", "InvalidArgumentError", "InvalidTensorError",
    "MismatchError", "MxFp8", "NotInitializedError", "OneBit", "PeerLostError", "PortTakenError", "PreparedOperation",
    "RandomK", "RefusedError", "RoundAbortedError", "SettingValue", "Settings", "TopK", "TransportError",
    "Uncompressed", "UnknownHandleError", "UnreachableError", "VersionError", "__version__", "accumulate",
    "accumulate_async", "all_gather", "all_gather_async", "all_to_all", "all_to_all_async", "barrier", "broadcast",
    "broadcast_async", "commit", "config", "declare", "declare_many", "dump", "empty", "feedback_state", "forget",
    "gather", "gather_async", "get_pushpull_speed", "init", "is_initialized", "load_feedback_state", "local_rank",
    "local_size", "metrics", "new_group", "poll", "prepare", "pull", "push", "push_pull", "push_pull_async",
    "push_pull_async_inplace", "push_pull_inplace", "push_pull_many", "push_pull_many_async", "rank", "recv",
    "recv_any", "recv_async", "reduce_scatter", "reduce_scatter_async", "scatter", "scatter_async", "send",
    "send_async", "shard_bounds", "shutdown", "size", "store", "synchronize", "unstore", "wait", "zeros",
]  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Operations on arrays: declare, push_pull and its relatives; bps_rdma.handle waits for them.

Arrays are numpy arrays, CPU torch tensors and other CPU arrays; they are used in place: nothing is copied on the way in
or out. Every rank of a group makes the same collective calls, with the same name, dtype, size and options.

    options     the options of one operation, as one value
    declare     names, shapes and dtypes, announced before their first use
    start       starts one operation of the core on arrays
    prepare     the same for operations that are started many times
    push_pull   sums and means, and their separate halves
    many        push_pull of many arrays with one call
    collectives reduce_scatter, all_gather and broadcast
    uneven      all_gather of parts that differ in size
    lanes       what the messages of two ranks go through
    messages    one message between two ranks
    point_to_point  starts messages from one rank to another one
    send_recv   send and recv
    exchanges   gather, scatter and all_to_all
    feedback    the memory of compression, for checkpoints
    weights     the weights that servers keep, for asynchronous training
"""

from bps_rdma.handle import poll, synchronize, wait
from bps_rdma.operations.collectives import (
    all_gather,
    all_gather_async,
    broadcast,
    broadcast_async,
    reduce_scatter,
    reduce_scatter_async,
)
from bps_rdma.operations.declare import declare, declare_many, forget
from bps_rdma.operations.exchanges import (
    all_to_all,
    all_to_all_async,
    gather,
    gather_async,
    scatter,
    scatter_async,
)
from bps_rdma.operations.feedback import feedback_state, load_feedback_state
from bps_rdma.operations.many import push_pull_many, push_pull_many_async
from bps_rdma.operations.options import OperationOptions, ReduceOp
from bps_rdma.operations.prepare import prepare, prepare_unowned
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

__all__ = [
    "OperationOptions",
    "ReduceOp",
    "accumulate",
    "accumulate_async",
    "all_gather",
    "all_gather_async",
    "all_to_all",
    "all_to_all_async",
    "broadcast",
    "broadcast_async",
    "declare",
    "declare_many",
    "feedback_state",
    "forget",
    "gather",
    "gather_async",
    "load_feedback_state",
    "poll",
    "prepare",
    "prepare_unowned",
    "pull",
    "push",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "push_pull_many",
    "push_pull_many_async",
    "recv",
    "recv_any",
    "recv_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "shard_bounds",
    "store",
    "synchronize",
    "unstore",
    "wait",
]

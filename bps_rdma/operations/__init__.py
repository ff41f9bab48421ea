# SPDX-License-Identifier: Apache-2.0
"""Operations on arrays: declare, push_pull and its relatives; bps_rdma.handle waits for them.

Arrays are numpy arrays, CPU torch tensors and other CPU arrays; they are used in place: nothing is copied on the way in
or out. Every rank of a group makes the same collective calls, with the same name, dtype, size and options.

    options     the options of one operation, as one value
    declare     names, shapes and dtypes, announced before their first use
    begun       what a call has begun, to be given up where it raises
    start       starts one operation of the core on arrays
    prepare     the same for operations that are started many times
    push_pull   sums and means, and their separate halves
    many        push_pull of many arrays with one call
    collectives reduce_scatter, all_gather and broadcast
    uneven      all_gather of parts that differ in size
    lanes       what the messages of two ranks go through
    messages    one message between two ranks
    receivers   receiving from whichever rank sends first
    point_to_point  starts messages from one rank to another one
    send_recv   send and recv
    exchanges   gather, scatter and all_to_all
    feedback    the memory of compression, for checkpoints
    weights     the weights that servers keep, for asynchronous training
"""

from bps_rdma.operations.options import OperationOptions, ReduceOp
from bps_rdma.operations.weights import accumulate_async, store, unstore

__all__ = ["OperationOptions", "ReduceOp", "accumulate_async", "store", "unstore"]

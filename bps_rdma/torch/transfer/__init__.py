# SPDX-License-Identifier: Apache-2.0
"""The one layer through which everything in bps_rdma.torch moves tensors.

CPU tensors are used in place, and with BPS_DEVICE_ROUTE the core takes those on a GPU, too. Without it tensors on a
device are staged: started by a call that only notes how far the caller's stream is, then copied in chunks through
pinned memory of the host, while the device goes on computing. The copy down, the network and the copy up of different
chunks overlap. The pinned memory is also mapped by the servers of this host and registered once, so a chunk is copied
only by the copy engines of the device.

Ranks may start operations in any order: each staged one in progress has memory of its own for at least one chunk, and
so never waits for another one (pipeline.py). Operations of one name are matched by their order.

    buffers      the pinned memory of a copy pipeline
    collectives  all_reduce, reduce_scatter, all_gather and broadcast, each asynchronous
    staged       ... of one tensor per rank, by the core alone or staged
    dense        views and copies of tensors as contiguous memory, in the dtypes of the core
    device       streams, events and copies of a device
    operation    the handle of a staged operation
    pipeline     the copy pipeline of one device and group
    hosts        what the GPUs of a host do among themselves first
"""

from bps_rdma.torch.transfer.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    core_operations,
    declare_each,
    declare_many,
    reduce_scatter,
)
from bps_rdma.torch.transfer.device import device_of, mapped, zeros_beside
from bps_rdma.torch.transfer.hosts import on_hosts
from bps_rdma.torch.transfer.operation import StagedOperation
from bps_rdma.torch.transfer.staged import AnyHandle, check_reducible, members_of, staged_from

__all__ = [
    "AnyHandle", "StagedOperation", "all_gather", "all_reduce", "broadcast", "check_reducible", "core_operations",
    "declare_each", "declare_many", "device_of", "mapped", "members_of", "on_hosts", "reduce_scatter", "staged_from",
    "zeros_beside",
]  # fmt: skip

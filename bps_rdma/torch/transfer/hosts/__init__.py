# SPDX-License-Identifier: Apache-2.0
"""Operations that the GPUs of a host begin and end among themselves, over NVLink: BPS_GPU_HOST_SUM.

Each of L ranks on a host then copies to the host, and sends, 1/L of what it would without.

    agreed       which operations and groups: decided alike on all ranks
    plan         which ranks sum what then
    queue        the thread that does them, one after the other
    pieces       ... piece by piece: what GPUs do before anything is sent, and after, by kind of operation
    collectives  ... by a backend of torch
    watch        ends those that wait for a lost rank
"""

from bps_rdma.torch.transfer.hosts.agreed import HostQueues, is_summed, on_hosts
from bps_rdma.torch.transfer.hosts.pieces import AllGather, AllReduce, Broadcast, ReduceScatter
from bps_rdma.torch.transfer.hosts.queue import HostQueue

__all__ = ["AllGather", "AllReduce", "Broadcast", "HostQueue", "HostQueues", "ReduceScatter", "is_summed", "on_hosts"]

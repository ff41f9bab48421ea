# SPDX-License-Identifier: Apache-2.0
"""Who takes the CUDA tensors of a process group: bps_rdma by memory of the host, or NCCL inside of the group."""

from __future__ import annotations

import functools

import torch.distributed as dist

import bps_rdma
from bps_rdma import _core, job

OWN, NCCL = "bps", "nccl"  # names of backends
_ALTERNATIVE = 'init_process_group("cpu:bps,cuda:nccl") leaves them to NCCL'


def meet_on_host() -> bool:
    """Whether tensors of several GPUs of this host would meet in its memory. To be called when a group is made."""
    running = job.current()
    return bps_rdma.local_size() > 1 and running.config.text("BPS_GPU_HOST_SUM") != "1"


def taker_of(group: dist.ProcessGroup, *, tells: bool, meet: bool) -> str | None:
    """The backend that the name of the group's backend gives CUDA tensors to; "": none. None: torch knows no such name.

    Torch tells a backend nothing of it, and knows the name only once the group is made.

    Args:
        group: of the backend bps.
        tells: this process is the one that tells.
        meet: what meet_on_host() has said.
    """
    named = dist.distributed_c10d._world.pg_backend_config.get(group)
    if named is None:
        return None
    found = dict(pair.split(":") for pair in named.split(",")).get("cuda", "")
    if tells:
        _tell(found, meet)
    return found


@functools.cache
def _tell(who: str, meet: bool) -> None:
    """Says, once, which library moves CUDA tensors: a warning where NCCL may be faster."""
    through = "CUDA tensors of torch.distributed go through bps_rdma"
    if who == NCCL:
        _core.log_info("CUDA tensors of torch.distributed go to NCCL, not to bps_rdma")
    elif who == OWN and meet and dist.is_nccl_available():
        _core.log_warning(f"{through}, and meet in memory of the host; {_ALTERNATIVE}")
    elif who == OWN:
        _core.log_info(f"{through}; {_ALTERNATIVE}")

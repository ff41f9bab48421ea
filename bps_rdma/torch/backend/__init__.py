# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend named bps: init_process_group("bps"), after `import bps_rdma.torch`.

All operations use push and pull. "cpu:bps,cuda:nccl" leaves CUDA tensors to NCCL. docs/torch-backend.md has the table.
"""

import torch.distributed as dist

from bps_rdma.torch.backend.joining import create
from bps_rdma.torch.backend.process_group import BpsProcessGroup

__all__ = ["BpsProcessGroup", "register"]


def register() -> None:
    """Makes the name bps known to torch.distributed. Calling it again changes nothing."""
    if dist.is_available() and "bps" not in dist.Backend.backend_list:
        dist.Backend.register_backend("bps", create, extended_api=True, devices=["cpu", "cuda"])

# SPDX-License-Identifier: Apache-2.0
"""A communication hook for torch's own DistributedDataParallel, on any of its backends."""

# Without annotations from the future: torch compares those of a hook with its classes.

from typing import Any

import torch
import torch.distributed as dist

from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch import transfer
from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.membership import group_of


def ddp_comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Averages DDP's buckets on bps_rdma's servers: `model.register_comm_hook(None, bps_rdma.torch.ddp_comm_hook)`.

    bps_rdma must run, with the ranks of the model's group: call bps_rdma.torch.init() after init_process_group().

    Args:
        state: the group: of torch.distributed or of bps_rdma; None: all workers.
        bucket: torch's GradBucket.

    Returns:
        A future of the bucket's tensor, in place.

    Raises:
        NotInitializedError, InvalidTensorError: nothing has been sent. Later errors are raised by backward(), as a
            RuntimeError with the text of the error.
    """
    tensor = bucket.buffer()
    handle = transfer.all_reduce(tensor, OperationOptions(ReduceOp.average, group=group_of(state)))
    return BpsWork("all_reduce", [handle], [], [tensor], [tensor]).get_future().then(_first)  # type: ignore[no-any-return]


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]

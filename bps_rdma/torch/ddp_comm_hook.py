# SPDX-License-Identifier: Apache-2.0
"""A communication hook for torch's own DistributedDataParallel, on any of its backends."""

# Without annotations from the future: torch compares those of a hook with its classes.

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from bps_rdma import job
from bps_rdma.arrays import Dtype
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import EXACT, NONE, AnyCompression, text_of
from bps_rdma.torch import transfer
from bps_rdma.torch.backend.folded import sum_sparse
from bps_rdma.torch.backend.pending import Pending
from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.checks import inexact
from bps_rdma.torch.membership import AnyGroup, group_of, unique
from bps_rdma.torch.units import Sent, as_real


class HookState:
    """What ddp_comm_hook() does with the buckets of one model. All ranks make theirs in the same order.

    The first pass that is synchronised travels uncompressed: torch then fills the buckets anew, in the order in which
    gradients became ready. Feedback and momentum therefore belong to the buckets that stay.

    Args:
        group: of torch.distributed or of bps_rdma; None: all workers.
        compression: how buckets of at least BPS_MIN_COMPRESS_BYTES travel between hosts, as in BFloat16() or
            Int8(feedback=True); see docs/compression.md. Default: what BPS_COMPRESSION says.
        exact: True: means are exact, and rounded once (see docs/exact.md). Default: what BPS_EXACT says.

    Raises:
        NotInitializedError: bps_rdma does not run.
        InvalidArgumentError: both compression and exact are given.
    """

    def __init__(
        self, group: AnyGroup = None, compression: AnyCompression | None = None, exact: bool | None = None
    ) -> None:
        running = job.current()
        method = text_of(compression, exact)
        ours = group_of(group)  # waits for other ranks
        self._sent = Sent(unique("ddp hook", ours), ours, method, running.min_compress_bytes)
        self._is_exact = running.compression(Dtype.float32, 1 << 60, method) == EXACT
        self._numbers: dict[tuple[int, ...], int] = {}  # the parameters of a bucket -> its number
        self._is_first_pass = True

    def wrapped_anew(self) -> None:
        """Notes that the same model has a new DDP, which begins with another first pass."""
        self._is_first_pass = True

    def options(self, bucket: Any) -> OperationOptions:
        """Those of the operation for one of torch's buckets. A name stands for the same parameters at all times."""
        tensor = as_real(bucket.buffer())
        parameters = tuple(map(id, bucket.parameters()))
        name = f"{self._sent.prefix}.bucket {self._numbers.setdefault(parameters, len(self._numbers))}"
        was_first, self._is_first_pass = self._is_first_pass, self._is_first_pass and not bucket.is_last()
        kind = _kind_without_exact_mean(bucket)
        if kind is not None and self._is_exact:
            raise inexact(f"bucket {bucket.index()}", kind)
        if tensor.layout is not torch.strided:  # rows travel as they are
            return OperationOptions(ReduceOp.average, name, group=self._sent.group)
        if was_first and not self._is_exact:
            name += " in the first pass"
            return OperationOptions(ReduceOp.average, name, group=self._sent.group, compression=NONE)
        return self._sent.options(name, 0, tensor.dtype, tensor.numel())


def ddp_comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Averages DDP's buckets on bps_rdma's servers: `model.register_comm_hook(None, bps_rdma.torch.ddp_comm_hook)`.

    bps_rdma must run, with the ranks of the model's group: call bps_rdma.torch.init() after init_process_group().
    Buckets whose parameters have other shapes on another rank are never added up: the pass fails with a DeadlineError
    that names one. Models of the same shapes share names: the ranks must run them in the same order, and compression
    with feedback needs a HookState for each.

    Args:
        state: a HookState, or the group: of torch.distributed or of bps_rdma; None: all workers.
        bucket: torch's GradBucket.

    Returns:
        A future of the bucket's tensor, in place.

    Raises:
        NotInitializedError: nothing has been sent.
        InvalidTensorError: nothing has been sent. For example, means are to be exact, and the bucket is sparse or
            complex. Later errors are raised by backward(), as a RuntimeError with the text of the error.
    """
    tensor = bucket.buffer()
    if isinstance(state, HookState):
        options = state.options(bucket)
    else:
        kind = _kind_without_exact_mean(bucket)
        if kind is not None and job.current().compression(Dtype.float32, 1 << 60, None) == EXACT:
            raise inexact(f"bucket {bucket.index()}", kind)
        options = OperationOptions(ReduceOp.average, _name_of(bucket), group=group_of(state))
    if tensor.layout is torch.strided:
        # All ranks start buckets in the same order: torch's own backends rely on that, too.
        pending = Pending([transfer.all_reduce(as_real(tensor), options, in_order=True)])
    else:
        ranks = transfer.members_of(options.group).size
        pending = sum_sparse(tensor, ReduceOp.average, ranks, options)
    work = BpsWork("all_reduce", pending.handles, pending.finishes, [tensor], [tensor])
    return work.get_future().then(_first)  # type: ignore[no-any-return]


def _name_of(bucket: Any) -> str:
    """Returns a name that says what the bucket consists of, alike on all ranks."""
    shapes = repr([(tuple(each.shape), str(each.dtype)) for each in bucket.parameters()])
    digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
    last = " and last" if bucket.is_last() else ""
    return f"ddp bucket {bucket.index()}{last}, {len(bucket.parameters())} parameters, {digest}"


def _kind_without_exact_mean(bucket: Any) -> str | None:
    if bucket.buffer().layout is not torch.strided:
        return "sparse"
    return "complex" if any(each.is_complex() for each in bucket.parameters()) else None


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]

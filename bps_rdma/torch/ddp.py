# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: a module that is trained by all ranks as if by one, on the mean of their gradients."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bps_rdma import job
from bps_rdma.errors import BpsError
from bps_rdma.spans import spans
from bps_rdma.torch import start
from bps_rdma.torch.broadcast import broadcast_parameters
from bps_rdma.torch.buffers import BufferBroadcast
from bps_rdma.torch.checks import check_module
from bps_rdma.torch.compression import AnyCompression, Compression, compressor_of
from bps_rdma.torch.names import unique
from bps_rdma.torch.plan import StrategyName
from bps_rdma.torch.rebase import remove_hooks
from bps_rdma.torch.start import AnyGroup
from bps_rdma.torch.synchronizer import GradientSynchronizer
from bps_rdma.torch.units import Place


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module: after `loss.backward()` every .grad is the mean over all ranks. Nothing else changes.

    Parameters and buffers start as those of the group's first rank, unless this process enters a job that is running
    (see TrainingState). Constructed inside an initialised torch.distributed group, or in a process that a launcher
    started, it joins the job by itself.

    The module may be on the CPU or on CUDA devices, whose gradients are staged through pinned memory; it must be on the
    same kind of device on all ranks. Gradients of the strategies with buckets are views of the buckets, which on the
    CPU all processes of a host map: with `zero_grad(set_to_none=False)` they are summed where backward writes them,
    otherwise backward's tensor is copied there once. Ranks may use different parameters; one that no rank used has no
    gradient, as in a single process.

    Args:
        module: parameters that are added to it later are not synchronised.
        device_ids: accepted for compatibility with BytePS; must be None or name one device.
        broadcast_buffers: before each forward in training, buffers become those of the group's first rank.
        compression: the dtype in which gradients are sent, e.g. Compression.bf16, or how float32 gradients of at least
            BPS_MIN_COMPRESS_BYTES travel between hosts, e.g. "int8:feedback=1"; see docs/compression.md.
        strategy: "bucketed": buckets, each sent as soon as backward has filled it; "overlap": the same, parameter by
            parameter; "flat": everything at once after backward; "naive": parameter by parameter after backward.
        bucket_mb: size of buckets, 2^20 bytes; the first one is 1 MB at most.
        group: a group of bps_rdma or of torch.distributed; also accepted as `process_group`.
        find_unused_parameters: False saves a small operation per pass in the strategies without buckets; parameters
            that no rank used then get zeros.
        exact: True: means are exact, and rounded once: the same bits for any number of ranks (see docs/exact.md).
            Default: what BPS_EXACT says.

    Raises:
        InvalidArgumentError, InvalidTensorError: an argument or a parameter cannot be used; names it.
        MismatchError: the module is not the same on all ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: AnyCompression = Compression.none,
        strategy: StrategyName = "bucketed",
        bucket_mb: float = 25.0,
        group: AnyGroup = None,
        process_group: AnyGroup = None,
        find_unused_parameters: bool = True,
        exact: bool | None = None,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) > 1:
            raise BpsError("several devices per process are not supported", "start one process per device")
        check_module(module)
        start.init()
        self.module = module
        self.require_backward_grad_sync = True
        ours = start.group_of(group if group is not None else process_group)
        prefix = unique("ddp")  # ranks make their modules in the same order
        root = ours.ranks[0] if ours else 0
        if not job.current().is_late:  # the others are beyond this; see TrainingState
            state = itertools.chain(module.named_parameters(), module.named_buffers())
            broadcast_parameters(state, root, prefix=f"{prefix}.initial.", group=ours)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.synchronizer = GradientSynchronizer(
            named, prefix, strategy, bucket_mb, compressor_of(compression, exact), ours, find_unused_parameters, None
        )
        self._buffers_of_root = BufferBroadcast(module, prefix, ours) if broadcast_buffers else None
        self._sync = True  # of the last forward; see no_sync()
        self._pending = False  # a forward has run, and its gradients have not been synchronised
        self._queued = False  # this backward will call _end_of_backward()
        self._backward_began = 0  # time.monotonic_ns()
        self._order: list[Place] | None = None  # in which the gradients of the first pass became ready
        self._rebuilt = False
        self._epoch = job.current().epoch  # of the view in which that is so
        hooks = [
            place.parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), place))  # type: ignore[no-untyped-call]
            for place in self.synchronizer.places
        ]
        # The module may outlive its wrapper, and get another one.
        weakref.finalize(self, remove_hooks, hooks)
        weakref.finalize(self, remove_hooks, self.synchronizer.hooks)

    # ---- Forward and backward

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's own forward.

        Raises:
            BpsError: the last backward failed before its end.
        """
        if not torch.is_grad_enabled():
            return self.module(*inputs, **named_inputs)
        self._begin()
        noted = spans()
        noted.step = self.synchronizer.passes
        with noted.around("forward"):
            outputs = self.module(*inputs, **named_inputs)
        if self._sync:
            # The callback for the end of backward is registered at its beginning: the hooks of parameters may run in a
            # nested backward, when parts of the module are checkpointed.
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._at_start_of_backward)  # type: ignore[no-untyped-call]
        return outputs

    def _begin(self) -> None:
        self._sync = self.require_backward_grad_sync
        self._queued = False  # a backward that failed may have left it
        if not self._sync:
            return
        if not self.synchronizer.begin_again():
            raise BpsError(
                "the last backward pass was not finished, so some gradients are still being synchronised",
                "call finish_gradient_synchronization() on all ranks, or restart the job",
            )
        if self._epoch != job.current().epoch:  # a rank that has entered knows of no order of gradients
            self._epoch = job.current().epoch
            self._order, self._rebuilt = None, False
            self.synchronizer.start_over()
        self._pending = True
        if self._buffers_of_root is not None and self.training:
            self._buffers_of_root.run()

    def _at_start_of_backward(self, _: torch.Tensor) -> None:
        if self._sync:
            self._finish_after_backward()

    def _finish_after_backward(self) -> None:
        if not self._queued:
            self._rebuild_once()
            self._queued = True
            self._backward_began = time.monotonic_ns()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _rebuild_once(self) -> None:
        # At the start of the second pass, not in a forward: a rank may run forward alone.
        if self._order is not None and not self._rebuilt:
            self._rebuilt = True
            self.synchronizer.rebuild(self._order)

    def _end_of_backward(self) -> None:
        self._pending = True
        spans().add("backward", self._backward_began)
        self.finish_gradient_synchronization()

    def finish_gradient_synchronization(self) -> None:
        """Waits until all gradients are means. backward() calls it at its end; further calls have no effect.

        If backward reached this module on other ranks but not on this one, this rank must call it.

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradients in time; names it.
        """
        self._queued = False
        if not (self._pending or self.synchronizer.open):
            return
        self._pending = False
        self._rebuild_once()
        if self._order is None:
            self._order = self.synchronizer.arrived
        self.synchronizer.begin()
        self.synchronizer.finish()

    synchronize = finish_gradient_synchronization  # BytePS's name

    def compression_state_dict(self) -> dict[str, Any]:
        """What compression remembers between passes on this rank: save it beside state_dict(), each rank its own.

        A collective call between passes: every rank must make it, which is why it is not a part of state_dict(). See
        bps_rdma.feedback_state().
        """
        return self.synchronizer.compression_state()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what compression_state_dict() gave on this rank. A collective call, before the first pass.

        Raises:
            InvalidArgumentError: it is the state of another module, or of another compression.
        """
        if self._buffers_of_root is not None:  # declares its names, as the first forward would: their order counts
            self._buffers_of_root.run()
        if self.synchronizer.load_compression_state(state):
            self._order, self._rebuilt = [place for unit in self.synchronizer.units for place in unit.places], True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes in here, and their backward, accumulate gradients on this rank only.

        The first backward of a forward outside synchronises all that has been accumulated. Where means are exact, what
        is accumulated is not rounded either, until it is the mean: see docs/exact.md.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def _hook(wrapper: weakref.ref[DistributedDataParallel], place: Place) -> Any:
    def arrived(_: torch.Tensor) -> None:
        ddp = wrapper()
        if ddp is None:
            return
        ddp.synchronizer.accumulated(place, not ddp._sync)
        if ddp._sync:
            ddp._finish_after_backward()
            ddp.synchronizer.ready(place)

    return arrived

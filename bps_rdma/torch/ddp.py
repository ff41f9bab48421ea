# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: a module that is trained by all ranks as if by one, on the mean of their gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.operations.options import AnyCompression, text_of
from bps_rdma.spans import spans
from bps_rdma.torch import membership
from bps_rdma.torch.broadcast import broadcast_parameters
from bps_rdma.torch.buffers import BufferBroadcast
from bps_rdma.torch.check_alike import check_alike
from bps_rdma.torch.checks import check_layers, check_module
from bps_rdma.torch.joining import Call, UnevenInputs, refuse_beside_join
from bps_rdma.torch.membership import AnyGroup
from bps_rdma.torch.module_passes import ModulePasses
from bps_rdma.torch.plan import StrategyName
from bps_rdma.torch.synchronizer import GradientSynchronizer, SynchronizerOptions
from bps_rdma.torch.transfer import members_of


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module: after `loss.backward()` every .grad is the mean over all ranks. Nothing else changes.

    Parameters and buffers start as those of the group's first rank, unless a process has just entered the job
    (see TrainingState). Constructed inside an initialised torch.distributed group, or in a process that a launcher
    started, it joins the job by itself.

    The module may be on the CPU or on CUDA devices, whose gradients are staged through pinned memory; it must be on the
    same kind of device on all ranks. Gradients of the strategies with buckets are views of the buckets, which on the
    CPU all processes of a host map: with `zero_grad(set_to_none=False)` they are summed where backward writes them,
    otherwise backward's tensor is copied there once. Ranks may use different parameters; one that no rank used has no
    gradient, as in a single process.

    Args:
        module: parameters that train later (unfrozen, added, replaced, of another dtype or shape) are synchronised from
            the next backward on, which raises MismatchError if they or their values are not the same on all ranks.
        device_ids: accepted for compatibility with BytePS; must be None or name one device.
        broadcast_buffers: before each forward in training, buffers become those of the group's first rank.
        compression: how gradients of at least BPS_MIN_COMPRESS_BYTES travel between hosts, as in BFloat16() or
            Int8(feedback=True); see docs/compression.md.
        strategy: "bucketed": buckets, each sent as soon as backward has filled it; "overlap": the same, parameter by
            parameter; "flat": everything at once after backward; "naive": parameter by parameter after backward.
        bucket_mb: size of buckets, 2^20 bytes; the first one is 1 MB at most. Default: one bucket up to 4 MB of
            gradients, and 25 beyond; on a GPU more for large models, because each bucket costs more there.
        group: a group of bps_rdma or of torch.distributed; also accepted as `process_group`.
        find_unused_parameters: buckets need no flag. True: ranks may leave parameters unused also where gradients are
            compressed, or have no buckets, which costs a small operation per pass. False: such a pass raises BpsError.
        exact: True: means are exact, and rounded once: the same bits for any number of ranks (see docs/exact.md).
            Default: what BPS_EXACT says.

    Raises:
        InvalidArgumentError, InvalidTensorError: an argument or a parameter cannot be used; names it. Or the module has
            a SyncBatchNorm, and torch.distributed, by which that finds the other ranks, is not initialised; or an
            Embedding that is trained with max_norm, which would change other rows on each rank.
        MismatchError: the module is not the same on all ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: AnyCompression | None = None,
        strategy: StrategyName = "bucketed",
        bucket_mb: float | None = None,
        group: AnyGroup = None,
        process_group: AnyGroup = None,
        find_unused_parameters: bool = False,
        exact: bool | None = None,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) > 1:
            raise InvalidArgumentError("several devices per process are not supported", "start one process per device")
        check_module(module)
        membership.init()
        ours = membership.group_of(group if group is not None else process_group)
        check_layers(module, members_of(ours).size)
        self.module = module
        self.require_backward_grad_sync = True
        self._arguments: SynchronizerOptions = {
            "strategy": strategy,
            "bucket_mb": bucket_mb,
            "compression": text_of(compression, exact),
            "group": ours,
            "find_unused": find_unused_parameters,
            "accumulates": None,
        }
        self._spreads_buffers = broadcast_buffers
        self._set_up()
        with self._passes.trained.making() as prefix:
            agrees = not job.current().has_entrants  # else some may be beyond this; see TrainingState
            if agrees:
                state = [*module.named_parameters(), *module.named_buffers()]
                broadcast_parameters(state, ours.ranks[0] if ours else 0, prefix=f"{prefix}.initial.", group=ours)
                # That goes by names; buckets and buffers are filled in the order in which the module has them.
                lines = [f"broadcast_buffers={broadcast_buffers}", *(name for name, _ in state)]
                check_alike(lines, f"{prefix}, parameters in their order", ours)
            self._passes.trained.begin(module.named_parameters(), alike=agrees)

    def _set_up(self) -> None:
        self._uneven = UnevenInputs()
        self._passes = ModulePasses(self.module, self._arguments, self._uneven)
        self._buffers_of_root: BufferBroadcast | None = None

    @property
    def synchronizer(self) -> GradientSynchronizer:
        """The object that averages the gradients."""
        return self._passes.synchronizer

    def __getstate__(self) -> dict[str, Any]:
        """The module and the arguments: a copy is synchronised by itself, under names of its own."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """All ranks that train a copy take the first steps of their copies in the same order."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_up()
        self._passes.trained.watch(self.module.parameters())

    # ---- Forward and backward

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's own forward.

        Raises:
            BpsError: the last backward failed before its end, when this rank had sent gradients.
        """
        if not torch.is_grad_enabled():
            return self.module(*inputs, **named_inputs)
        self._follow_module()
        self._passes.begin_forward(self.require_backward_grad_sync, self._forward_takes_all)
        if self.require_backward_grad_sync and self._spreads_buffers and self.training:
            self._spread_buffers()
        noted = spans()
        noted.step = self._passes.trained.passes
        with noted.around("forward"):
            outputs = self.module(*inputs, **named_inputs)
        self._passes.watch(outputs)
        return outputs

    def _forward_takes_all(self) -> bool:
        """Whether ranks meet in a forward."""
        if self._uneven.joined:
            return True
        if self._spreads_buffers and self.training and next(self.module.buffers(), None) is not None:
            return True
        return any(isinstance(each, torch.nn.SyncBatchNorm) and each.training for each in self.module.modules())

    def _follow_module(self) -> None:
        if self._passes.follow(self.module):
            self._buffers_of_root = None

    def _spread_buffers(self) -> None:
        if self._buffers_of_root is None:
            self._buffers_of_root = BufferBroadcast(self.module, self._passes.trained.prefix, self._arguments["group"])
        if next(self.module.buffers(), None) is not None:
            self._buffers_of_root.run(self._uneven.announce_buffers())

    def finish_gradient_synchronization(self) -> None:
        """Waits until all gradients are means. backward() calls it at its end; then it has no effect until zero_grad().

        If backward reached this module on other ranks but not on this one, this rank must call it. It may have had no
        batch, and have run no forward either. After a backward that has failed on this rank it ends the pass: with
        means if all gradients had been sent, otherwise with an error on all ranks.

        Raises:
            RefusedError: backward has failed on this rank, or on another one, before all gradients were sent.
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradients in time; names it.
            MismatchError: ranks train different parameters; names the first one.
        """
        self._follow_module()
        if self._passes.is_missed:
            if self._spreads_buffers and self.training:  # as the forward of the others does
                self._spread_buffers()
            self._passes.begin_missed()
        self._passes.finish()

    synchronize = finish_gradient_synchronization  # BytePS's name

    def compression_state_dict(self) -> dict[str, Any]:
        """Returns the feedback that compression keeps on this rank. Each rank saves its own, beside state_dict().

        A collective call between passes: every rank must make it, which is why it is not a part of state_dict(). See
        bps_rdma.feedback_state().
        """
        self._follow_module()
        self._passes.make_first()
        return self.synchronizer.compression_state()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what compression_state_dict() gave on this rank. A collective call, before the first pass.

        Raises:
            InvalidArgumentError: it is the state of another module, or lacks what this compression remembers.
        """
        self._follow_module()
        self._passes.make_first()
        if self._spreads_buffers:  # declares its names, as the first forward would: their order counts
            self._spread_buffers()
        self._passes.load_compression_state(state)

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

    # ---- Uneven inputs

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Trains on uneven inputs, as torch's DistributedDataParallel.join() does: put the loop over batches in here.

        A rank whose loop has ended takes part in the passes of the others with zeros. When the last loop has ended, all
        ranks get the parameters and buffers of a rank that made all steps; optimizers keep their own states.

        Args:
            divide_by_initial_world_size: False: gradients are means over the ranks that still have inputs.
            enable: False: this context does nothing.
            throw_on_early_termination: raise an error on all ranks as soon as one has no inputs.

        Raises:
            BpsError: a rank has no inputs, and that was to be an error. Or gradients of an earlier pass were neither
                used up nor zeroed: a rank without inputs does not have these. Or the last backward failed
                before its end, when this rank had sent gradients.
        """
        if not enable:
            yield
            return
        refuse_beside_join()
        self._follow_module()
        self._passes.make_first()
        prefix, group = self._passes.trained.prefix, self._arguments["group"]

        def finish(last: int) -> None:
            state = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
            broadcast_parameters(state, last, prefix=f"{prefix}.joined.", group=group)

        calls = {Call.buffers: self._spread_buffers, Call.gradients: self._passes.shadow}
        try:
            with self._uneven.join(
                prefix, group, calls, finish,
                compression=self._passes.synchronizer.compression,
                divide_by_initial_world_size=divide_by_initial_world_size,
                throw_on_early_termination=throw_on_early_termination,
            ):  # fmt: skip
                yield
                self._passes.end_inputs()
        finally:
            self._passes.forget_means()


# These attributes belong to this wrapper; its copies get their own.
_OWN = frozenset({"_uneven", "_passes", "_buffers_of_root"})

# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: an optimizer that steps on the mean of all ranks' gradients, as BytePS and Horovod have it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bps_rdma import job
from bps_rdma.errors import BpsError, InvalidArgumentError, RefusedError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import NONE, AnyCompression, text_of
from bps_rdma.spans import spans
from bps_rdma.torch import membership, transfer
from bps_rdma.torch.asynchronous import AsynchronousOptimizer
from bps_rdma.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from bps_rdma.torch.checks import check_count, check_layers_of, check_not_averaged, check_optimizer
from bps_rdma.torch.joining import Call, UnevenInputs, refuse_beside_join
from bps_rdma.torch.membership import AnyGroup
from bps_rdma.torch.parameters import FixedParameters, names_of
from bps_rdma.torch.plan import StrategyName
from bps_rdma.torch.seen_gradients import SeenGradients
from bps_rdma.torch.synchronizer import SynchronizerOptions
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.units import IndexedParameter
from bps_rdma.torch.wrapped import WrappedOptimizer
from bps_rdma.torch.wrapping import forgetting_scale, rebase

_FINISH = "call synchronize() on this rank; if that returns, all ranks have means, and step"


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: AnyCompression | None = None,
    backward_passes_per_step: int = 1,
    strategy: StrategyName = "bucketed",
    bucket_mb: float | None = None,
    group: AnyGroup = None,
    exact: bool | None = None,
    sparse: Iterable[str] = (),
    find_unused_parameters: bool = False,
) -> SynchronousOptimizer | AsynchronousOptimizer:
    """The optimizer, for whose parameters backward() gives gradients that are means over all ranks.

    With BPS_ASYNC=1 servers keep the weights, and no rank waits for another; see docs/async.md. Otherwise gradients are
    sent during backward, as soon as they are complete, and are means when it returns. Use broadcast_parameters() and
    broadcast_optimizer_state() to start from the same values.

        optimizer.zero_grad(); loss.backward(); clip(...); optimizer.step()

    Parameters that train later (unfrozen, or added by add_param_group()) are averaged from the next backward on, which
    raises MismatchError if they or their values are not the same on all ranks.

    Args:
        optimizer: any torch.optim.Optimizer, of parameters on the CPU or on CUDA devices; it shares its state with the
            result.
        named_parameters: (name, parameter) for all of its parameters, the same names on all ranks, for instance
            `model.named_parameters()`; None: they are named by their place in the optimizer.
        compression: how gradients of at least BPS_MIN_COMPRESS_BYTES travel between hosts, as in BFloat16() or
            Int8(feedback=True); see docs/compression.md.
        backward_passes_per_step: backward passes, the same number on all ranks, whose gradients are added up before
            they are sent, not averaged; with exact means without rounding.
        strategy, bucket_mb, find_unused_parameters: as for DistributedDataParallel.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        exact: True: means are exact, and rounded once: the same bits for any number of ranks (see docs/exact.md).
            Default: what BPS_EXACT says.
        sparse: names of parameters whose gradients are sparse, as of Embedding(sparse=True); the same on all ranks.

    Raises:
        InvalidArgumentError: a name twice, a parameter without a name, or an unknown name in `sparse`. Or a parameter
            is that of a SyncBatchNorm, and torch.distributed is not initialised, or of an Embedding with max_norm; or
            torch's DistributedDataParallel averages its gradients already.
        InvalidTensorError, MismatchError: a parameter cannot be synchronised; names it.
    """
    check_optimizer(optimizer)
    membership.init()
    ours = membership.group_of(group)
    named = names_of(optimizer, named_parameters)
    check_count("backward_passes_per_step", backward_passes_per_step, 1)
    own = {id(each) for options in optimizer.param_groups for each in options["params"]}
    check_layers_of([(name, each) for name, each in named if id(each) in own], members_of(ours).size)
    if job.current().asynchronous:
        how = text_of(compression, exact)
        if how not in (None, NONE):
            raise InvalidArgumentError("changes of weights travel as they are", "do without compression and exact")
        if how is None:
            _refuse_settings()
        kept = rebase(optimizer, AsynchronousOptimizer)
        kept._begin(FixedParameters(optimizer, named), ours)
        return kept
    check_not_averaged(named)
    result = rebase(optimizer, SynchronousOptimizer)
    arguments: SynchronizerOptions = {
        "strategy": strategy, "bucket_mb": bucket_mb, "compression": text_of(compression, exact), "group": ours,
        "sparse": _sparse(sparse, named), "find_unused": find_unused_parameters,
    }  # fmt: skip
    result._bps_begin(named, backward_passes_per_step, arguments)
    return result


def _sparse(names: Iterable[str], named: Iterable[tuple[str, torch.nn.Parameter]]) -> frozenset[str]:
    if isinstance(names, str):
        raise InvalidArgumentError(f"sparse={names!r} is no list of names", f"pass sparse=[{names!r}]")
    found = frozenset(names)
    unknown = sorted(found - {name for name, _ in named})
    if unknown:
        raise InvalidArgumentError(
            f"sparse= names {unknown[0]!r}, which no parameter has", "use the names that named_parameters has"
        )
    return found


def _refuse_settings() -> None:
    """Raises InvalidArgumentError where a setting asks for what changes of weights cannot have."""
    running = job.current()
    for name in ("BPS_EXACT", "BPS_COMPRESSION"):
        value = running.config.text(name)
        if value not in ("", "0", NONE):
            raise InvalidArgumentError(
                f"changes of weights travel as they are, and there is {name}={value}",
                f"do without {name}, or without BPS_ASYNC; or pass exact=False if {name} is for other tensors",
            )


class SynchronousOptimizer(WrappedOptimizer):
    """See DistributedOptimizer()."""

    _bps_kind = "Gradient"
    _bps_backwards: int  # since gradients were means
    _bps_done: bool  # gradients are means, and step() has not used them
    _bps_means: dict[torch.nn.Parameter, weakref.ref[torch.Tensor]]  # means to which nothing may be added
    _bps_to_repeat: SeenGradients | None  # the means that a step() found which has failed since
    _bps_failed: SeenGradients | None  # what the last pass, which has failed, has left: no gradients of anything
    _bps_skip: bool

    def _bps_set_up(self) -> None:
        super()._bps_set_up()
        self._bps_done = self._bps_skip = False
        self._bps_to_repeat = self._bps_failed = None
        self._bps_means = {}
        self._bps_uneven = UnevenInputs()

    def _bps_begin_step(self) -> None:
        super()._bps_begin_step()
        self._bps_backwards = 0

    def _bps_arrived(self, parameter: torch.nn.Parameter) -> None:
        trained = self._bps_trained
        entry = trained.entry_of(parameter)
        if entry is not None and parameter in self._bps_means:
            self._bps_refuse_to_add(entry)
        self._bps_done = False
        self._bps_to_repeat = self._bps_failed = None
        if trained.is_open and not self._bps_end.is_due and trained.synchronizer.drop_void():
            self._bps_begin_step()
        self._bps_end.ask()
        left = self._bps_left[parameter] = max(self._bps_left.get(parameter, self._bps_passes) - 1, 0)
        if entry is not None:
            trained.synchronizer.accumulated(entry, left > 0)
        if left == 0:
            if not trained.is_open:
                self._bps_settle()
                entry = trained.entry_of(parameter)
            if entry is not None:
                trained.ready(entry)

    def _bps_refuse_to_add(self, entry: IndexedParameter) -> None:
        synchronizer = self._bps_trained.synchronizer
        if not (synchronizer.is_exact or self._bps_uneven.joined):
            return  # join() has ended
        mean = self._bps_means[entry.parameter]()
        if mean is None or mean is not synchronizer.added_to(entry):
            return  # the script has dropped the mean, and goes on with another batch
        again = f"{entry.name!r} got a gradient again before step(), after {self._bps_passes} backward passes"
        raise BpsError(
            f"in join(), {again}; ranks without inputs do not have the mean of the passes before"
            if self._bps_uneven.joined
            else f"{again}, and would be rounded in between",
            "set backward_passes_per_step to the number of backward passes between steps, and call zero_grad() where a "
            "batch makes no step",
        )

    def _bps_settle(self) -> None:
        if not self._bps_trained.is_open:
            self._bps_uneven.announce_pass()
        super()._bps_settle()

    def _bps_backward_ended(self) -> None:
        # Gradients are means when backward() returns: code that looks at them then, as a clipper or a loss scaler does,
        # sees the same on all ranks.
        super()._bps_backward_ended()
        self._bps_backwards += 1
        if self._bps_backwards >= self._bps_passes:
            self.synchronize()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step; between two steps."""
        self._bps_passes = passes
        self._bps_begin_step()
        self._bps_arguments["accumulates"] = passes > 1
        if self._bps_trained.is_made:
            self._bps_trained.synchronizer.accumulate(passes > 1)

    def synchronize(self) -> None:
        """Makes all gradients means over the ranks, if backward() has not yet. Every rank calls it, or step().

        backward() does it at its end, after as many passes as make a step. Only what backward() did not reach on this
        rank, although it did on others, is left for this call.

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradients in time; names it.
            MismatchError: ranks train different parameters, or their first values differ; names the first one.
            RefusedError: backward has failed on this rank, or on another one, before all gradients were sent.
            BpsError: the last pass has failed, and what it has left is still in .grad of a parameter.
        """
        if self._bps_done and not self._bps_trained.is_open:
            return
        failed, self._bps_failed = self._bps_failed, None
        if failed is not None and failed.any_is_there():
            self._bps_failed = failed
            raise BpsError(
                "the gradients are not those of any batch, because their averaging has failed",
                "call zero_grad(), and backward() once more",
            )
        to_repeat, self._bps_to_repeat = self._bps_to_repeat, None
        if to_repeat is not None and to_repeat.all_are_there() and not self._bps_trained.is_open:
            self._bps_done = True
            return
        self._bps_end.forget()
        self._bps_settle()
        before = self._bps_trained.passes
        try:
            self._bps_trained.finish()
        except BaseException:
            if self._bps_trained.passes > before:
                self._bps_failed = SeenGradients.after_an_error(self._bps_parameters())
            raise
        finally:
            if self._bps_trained.is_open or self._bps_trained.passes > before:
                self._bps_uneven.end_pass()  # otherwise nothing was sent: the other ranks still wait for this pass
            self._bps_begin_step()
        synchronizer = self._bps_trained.synchronizer
        self._bps_uneven.scale(gradient for _, gradient in synchronizer.gradients())
        if synchronizer.is_exact or self._bps_uneven.joined:
            self._bps_means = {entry.parameter: weakref.ref(mean) for entry, mean in synchronizer.gradients()}
        self._bps_done = True

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Trains on uneven inputs; see DistributedDataParallel.join(). Put the loop over batches in here.

        In the end all ranks get the parameters of a rank that made all steps, and its optimizer's state. Buffers of the
        model stay as they are: use broadcast_parameters(model.state_dict()) for these.

        Raises:
            BpsError: as DistributedDataParallel.join().
        """
        if not enable:
            yield
            return
        refuse_beside_join()
        self._bps_settle()
        prefix, group = self._bps_trained.prefix, self._bps_arguments["group"]

        def shadow() -> None:
            self.zero_grad()
            with contextlib.suppress(RefusedError):  # the other ranks go on
                self.synchronize()
            self.zero_grad()

        def finish(last: int) -> None:
            broadcast_parameters(self._bps_named(), last, f"{prefix}.joined.", group)
            broadcast_optimizer_state(self, last, f"{prefix}.joined state.", group)

        with self._bps_uneven.join(
            prefix, group, {Call.gradients: shadow}, finish,
            compression=self._bps_trained.synchronizer.compression,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        ):  # fmt: skip
            yield
            self._bps_end_inputs()

    def _bps_end_inputs(self) -> None:
        """This rank has none any more, and the others may still wait for a pass whose backward has failed here."""
        self._bps_end.forget()
        trained = self._bps_trained
        if not trained.is_open or trained.synchronizer.begin_again(keeps_void=True):
            return
        if not trained.synchronizer.drop_void():
            name = trained.synchronizer.unfinished
            raise BpsError(f"the last backward pass was not finished: the gradient of {name!r} is no mean", _FINISH)
        trained.synchronizer.begin_failed()
        with contextlib.suppress(RefusedError):  # this rank's own, or that of another one
            self.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context step() does not synchronise: use it after synchronize()."""
        self._bps_skip = True
        try:
            yield
        finally:
            self._bps_skip = False

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Synchronises, then steps. With a closure it does so after each call; the loss is the mean over the ranks."""
        with forgetting_scale(self):
            return self._bps_step(closure, **options)

    step.hooked = True  # type: ignore[attr-defined]  # for torch: the step() that it calls runs the hooks of users

    def _bps_step(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        if closure is None:
            self._synchronize_once()
            try:
                with spans().around("optimizer"):
                    return super().step(**options)
            except BaseException:  # the script may call it again, on this rank alone, with the same means
                self._bps_to_repeat = SeenGradients.after_an_error(self._bps_parameters())
                raise
        if self._bps_uneven.joined:
            raise InvalidArgumentError(
                "step() got a closure in join(), and ranks without inputs cannot evaluate it",
                "give all ranks equally many batches, or use an optimizer that needs no closure",
            )

        def synchronized() -> Any:
            loss = closure()
            self._synchronize_once()
            return self._mean(loss)

        return super().step(synchronized, **options)

    def _synchronize_once(self) -> None:
        if not self._bps_skip:
            self.synchronize()
        self._bps_done = False  # the step may run a backward, in its hooks
        self._bps_means = {}

    def _mean(self, loss: Any) -> Any:
        """The mean loss: an optimizer that compares losses must get the same on all ranks, or they take other paths."""
        sent = self._bps_trained.synchronizer.sent
        if isinstance(loss, float):
            return self._mean(torch.tensor(loss, dtype=torch.float64, device="cpu")).item()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return loss
        name = f"{sent.prefix}.loss.{loss.dtype}"
        options = OperationOptions(ReduceOp.average, name, 0, sent.group, None, True)
        return transfer.all_reduce(loss.detach().clone(memory_format=torch.contiguous_format), options).wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients as usual. All ranks forget those that were not used for a step.

        Raises:
            BpsError: backward() has failed while gradients were being averaged.
        """
        trained = self._bps_trained
        self._bps_end.forget()
        if trained.is_open and not trained.synchronizer.begin_again():
            raise BpsError(
                f"zero_grad() was called before the gradient of {trained.synchronizer.unfinished!r} is a mean, because "
                "backward() has not come to its end",
                _FINISH,
            )
        self._bps_begin_step()
        self._bps_done = False
        self._bps_to_repeat = self._bps_failed = None
        self._bps_means = {}
        if trained.is_made:
            trained.synchronizer.follow_shapes()
        super().zero_grad(set_to_none)

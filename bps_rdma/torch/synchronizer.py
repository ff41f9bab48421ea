# SPDX-License-Identifier: Apache-2.0
"""The engine of all data parallelism here: averages gradients over the ranks as backward completes them.

A pass begins with the first gradient of a backward and ends with finish(), after which every parameter's .grad is the
average over the group. Gradients are sent in units (units.py), according to a strategy (plan.py). Parameters that the
next forward needs first have the highest priority.

Ranks need not agree on which parameters they used: a parameter without a gradient here counts as zeros, and stays
without one when no rank had one, as it would in a single process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch

import bps_rdma
from bps_rdma import Group, job
from bps_rdma.arrays import Dtype
from bps_rdma.errors import BpsError, MismatchError, RefusedError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import EXACT
from bps_rdma.spans import spans
from bps_rdma.torch import early_steps, membership, returned, transfer
from bps_rdma.torch.bucket_sizes import BucketSizes, bucket_sizes, sizes_of
from bps_rdma.torch.checks import check_exact, check_number, check_parameter
from bps_rdma.torch.failed_gradients import FailedGradients
from bps_rdma.torch.gradient_pass import GradientPass
from bps_rdma.torch.ordered_units import OrderedUnits
from bps_rdma.torch.plan import StrategyName, Unit, strategy_of
from bps_rdma.torch.ranges import noted
from bps_rdma.torch.refused import Refused
from bps_rdma.torch.sparse import Rows
from bps_rdma.torch.units import Bucket, IndexedParameter, Sent, Single, strides_of
from bps_rdma.torch.unrounded_passes import UnroundedPasses
from bps_rdma.torch.unused import UnusedParameters
from bps_rdma.torch.wrapping import remove_hooks


class SynchronizerOptions(TypedDict, total=False):
    """The keywords of GradientSynchronizer, for those that make one anew when other parameters are trained."""

    strategy: StrategyName
    bucket_mb: float | None
    compression: str | None
    group: Group | None
    find_unused: bool
    accumulates: bool | None
    sparse: frozenset[str]
    in_order: bool


def option_lines(options: SynchronizerOptions) -> list[str]:
    """Those that must be the same on all ranks, for check_alike(). Ranks with other sizes or codes learn it before."""
    return [
        f"strategy={options.get('strategy', 'bucketed')}",
        f"find_unused_parameters={options.get('find_unused', False)}",
        f"sparse={sorted(options.get('sparse', ()))}",
    ]


class GradientSynchronizer:
    """Averages gradients of the given parameters.

    Args:
        named: (name, parameter); names are the same on all ranks, and unique.
        prefix: of all names; unique in the job.
        strategy: "naive", "flat", "overlap" or "bucketed".
        bucket_mb: size of buckets, 2^20 bytes; None: chosen by the size of all gradients and where they lie.
        compression: the text of the method; see OperationOptions.
        group: who takes part; None: all workers.
        find_unused: leave parameters that no rank used without a gradient; without buckets, and where they are
            compressed, this needs one small operation per pass. False: a pass must use all parameters there, or none.
        accumulates: where sums are exact, whether gradients of several backward passes are added before they are sent,
            on all ranks; None: the ranks tell each other in each pass, by one small operation. See accumulation.py.
        sparse: names of the parameters whose gradients are sparse, the same on all ranks; see sparse.py.
        in_order: where GPUs of a host may sum first, gradients wait for those that come before them on all ranks.

    Raises:
        InvalidTensorError: a parameter's dtype, layout or device is not supported; names it.
        MismatchError: ranks disagree about the parameters.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        prefix: str,
        strategy: StrategyName = "bucketed",
        bucket_mb: float | None = None,
        compression: str | None = None,
        group: Group | None = None,
        find_unused: bool = False,
        accumulates: bool | None = False,
        sparse: frozenset[str] = frozenset(),
        in_order: bool = True,
    ) -> None:
        if bucket_mb is not None:
            check_number("bucket_mb", bucket_mb, 0)
        self.entries = [
            IndexedParameter(index, name, parameter, strides_of(parameter))
            for index, (name, parameter) in enumerate(named)
        ]
        for entry in self.entries:
            check_parameter(entry.name, entry.parameter)
        self._pass: GradientPass | None = None
        self.failed = FailedGradients()
        early_steps.begin_to_look()
        self._spans = spans()
        self.exposed_s = 0.0  # seconds spent waiting in finish(), all passes together
        self.passes = 0
        self.failure: Exception | None = None  # of this rank alone, because of which no rank got means in the last pass
        self._strategy = strategy_of(strategy)
        running = job.current()
        method = running.compression(Dtype.float32, 1 << 60, compression)
        compressed = method not in ("", EXACT)
        self.compression = method if compressed else None  # of large gradients
        self.sent = Sent(
            prefix, group, compression, running.min_compress_bytes, keeps_flags=not compressed, in_order=in_order
        )
        self.is_exact = method == EXACT
        if self.is_exact:
            check_exact(self.entries, sparse)
        self._unrounded = UnroundedPasses(self.entries, self.sent, is_exact=self.is_exact, accumulates=accumulates)
        self._unused: UnusedParameters | None = None
        self._must_use: list[IndexedParameter] = []
        self._frozen: list[IndexedParameter] = []  # of the last pass that did not wait
        self._refused: dict[Unit, Refused] = {}  # likewise
        try:
            if self.entries and (compressed or not self._strategy.buckets):  # units do not tell who used what
                if find_unused:
                    self._unused = UnusedParameters(self.entries, self.sent, declares=compressed)
                else:
                    self._must_use = self.entries
            sizes = _sizes_for(self.entries, sparse) if bucket_mb is None else sizes_of(bucket_mb)
            self._ordered = OrderedUnits(self.entries, self._strategy, sizes, self.sent, sparse)
        except BaseException:  # such as the end of a view
            remove_hooks(self.hooks)
            raise

    @property
    def units(self) -> list[Unit]:
        """What is sent in a pass, in the order in which it is expected to become ready."""
        return self._ordered.units

    @property
    def hooks(self) -> list[Any]:
        """To be removed when this object goes."""
        return self._unrounded.hooks

    # ---- A pass

    def begin(self) -> None:
        """Opens a pass, if none is open: also when there is no gradient here, other ranks may have some."""
        self._open_pass()

    def begin_failed(self) -> None:
        """Opens a pass whose backward has failed before its first gradient."""
        self._open_pass().is_cut = True

    def _open_pass(self, arrives: IndexedParameter | None = None) -> GradientPass:
        if self._pass is None:
            self._spans = spans()
            self._spans.step = self.passes
            self._pass = GradientPass(
                self._ordered, self._strategy, self._unrounded, self._unused, self._must_use, self._spans, arrives
            )
            if (left := self.failed.first_there()) is not None:
                name = next((entry.name for entry in self.entries if entry.parameter is left), "a parameter")
                self._pass.failure = RefusedError(
                    f"backward() failed before its end, and what it computed is still in the gradient of {name!r}",
                    "zero the gradients of the whole model, as model.zero_grad() does, and repeat the step",
                )
            if transfer.members_of(self.sent.group).size > 1:
                early_steps.watch(self)
        return self._pass

    @property
    def open(self) -> bool:
        """True between the first gradient of a pass and its end."""
        return self._pass is not None

    @property
    def arrived(self) -> list[IndexedParameter]:
        """The parameters whose gradients have become ready in this pass, in order."""
        return [] if self._pass is None else self._pass.arrived

    def take_over(self, before: GradientSynchronizer, remembers: bool) -> None:
        """Takes the place of another one, between passes; it is closed.

        Args:
            remembers: also takes what compression remembers, which the end of a view has lost: a collective call.
        """
        if remembers:
            self._ordered.take_over(before._ordered)
        self.passes, self.exposed_s = before.passes, before.exposed_s
        self._unrounded.take_over(before._unrounded)
        self.failed = before.failed
        before.close()

    def follow_shapes(self) -> None:
        """A forward begins: parameters may have other shapes."""
        self._unrounded.follow_shapes()

    def accumulate(self, accumulates: bool | None) -> None:
        """Sets `accumulates` anew, between passes."""
        self._unrounded.accumulate(accumulates)

    def added_to(self, entry: IndexedParameter) -> torch.Tensor | None:
        """The .grad to which autograd has added a gradient; before accumulated()."""
        return self._unrounded.added_to(entry)

    def accumulated(self, entry: IndexedParameter, accumulates: bool) -> None:
        """Autograd has added a gradient to .grad: to be called for each one, before ready().

        Args:
            accumulates: more passes follow before gradients are sent.
        """
        self._unrounded.accumulated(entry, accumulates)

    def ready(self, entry: IndexedParameter) -> None:
        """The gradient of a parameter is complete. Sends its unit if that has all its gradients now.

        Raises:
            BpsError: it has been sent already: backward computed two gradients of this parameter. Or a backward
                has failed in this pass.
            InvalidTensorError: it is sparse.
        """
        self._open_pass(entry).ready(entry)

    def finish(self) -> None:
        """Ends the pass: all .grad are averages then. Without a pass this has no effect.

        After an error the gradients are undefined, and nothing writes to them any more. If the pass is still open then,
        as after Ctrl-C, other ranks wait for the rest of it: call this once more. What this rank cannot send, because
        backward has failed before, it refuses: then all ranks raise an error. Gradients of a device may still be
        written to, unless the core copies them (BPS_DEVICE_ROUTE) and GPUs of a host do not sum (BPS_GPU_HOST_SUM).

        Raises:
            PeerLostError, DeadlineError: once no operation is in progress.
            RoundAbortedError: the same on every rank that is left; repeat the step.
            MismatchError: a rank has refused to send gradients; take_failure() says why, if it is this one.
        """
        ending = self._pass
        if ending is None:
            return
        self.failure = None
        begin = time.perf_counter()
        try:
            with noted(self._spans, "wait for gradients"):
                ending.complete(refuses=True)
                self._end_pass()
                ending.wait()
                bps_rdma.commit(self.sent.group)  # or some ranks would use gradients that others have not got
            self.failed.forget()
            returned.others_moved(self._bytes, lambda: [entry.parameter for entry in self.entries])
        except BaseException as error:
            self._fail(ending, error)
            raise
        finally:
            self.exposed_s += time.perf_counter() - begin

    def _fail(self, ending: GradientPass, error: BaseException) -> None:
        ending.give_up()
        if not (ending.has_begun or ending.is_over):
            self._pass = None  # the other ranks wait for another one
        elif self._pass is not None and (ending.is_over or isinstance(error, Exception)):
            self._end_pass()  # what keeps this rank from sending the rest would do so again
        if self._pass is None:
            self.failure = ending.take_failure()

    def take_failure(self) -> Exception | None:
        """Why this rank alone has refused to send gradients of the last pass. This object does not keep it."""
        failure, self.failure = self.failure, None
        return failure

    def give_up(self) -> None:
        """Something was raised in an open pass: ends what it has sent, on all ranks. It stays open for finish()."""
        if self._pass is not None:
            self._pass.give_up()

    @property
    def unfinished(self) -> str:
        """The name of a parameter of the open pass whose gradient is not a mean yet."""
        return "" if self._pass is None else self._pass.unfinished

    def gradients(self) -> list[tuple[IndexedParameter, torch.Tensor]]:
        """The parameters that have a gradient, each with it."""
        found = [(entry, entry.parameter.grad) for entry in self.entries]
        return [(entry, gradient) for entry, gradient in found if gradient is not None]

    # ---- A pass that ends without waiting: single means are taken when they are needed

    def finish_later(self) -> BpsError | None:
        """Sends all units that have not been sent, and ends the pass without waiting; take_mean() gives the means.

        Those that this rank cannot send, because backward has failed before, it refuses; then `failure` is set.

        Returns:
            What the caller is to raise: this rank used some parameters only, and nothing tells whether others used the
            rest.

        Raises:
            BpsError: a gradient cannot be sent. Nothing is in progress then, and the pass is over.
        """
        ending = self._open_pass()
        self.failure = None
        try:
            ending.complete(refuses=ending.is_cut)
            self.failure, self._refused = ending.take_failure(), ending.refused
            self._frozen = ending.frozen
            unused = ending.error_of_unused()
            ending.end_claims()
            self._end_pass()
        except Exception as error:  # after Ctrl-C another call goes on: nobody looks at gradients meanwhile
            self._fail(ending, error)
            raise
        return unused

    def take_mean(self, entry: IndexedParameter) -> torch.Tensor | None:
        """The mean of one gradient of the last pass; None when no rank had one. Once per pass, after finish_later().

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradient in time; names it.
            MismatchError: a rank has refused to send it.
        """
        single = self._ordered.of(entry)
        assert isinstance(single, Single)
        refused = self._refused.get(single)
        if refused is not None:
            refused.wait()
            failure = self.failure_anew()
            assert failure is not None
            try:
                raise failure  # there is no other rank
            finally:
                del failure
        unit = self._unrounded.was_sent(single)
        begin = time.perf_counter()
        with noted(self._spans, "wait for gradients"):
            unit.wait()
            returned.others_moved(lambda: _bytes_of(entry), lambda: [entry.parameter])
            unused = self._frozen if self._unused is None else self._unused.found()
        self.exposed_s += time.perf_counter() - begin
        mean = unit.release()
        return None if entry in unused else mean

    def failure_anew(self) -> BpsError | None:
        """An error with the words of `failure`, after finish_later(). Once raised, one refers to what backward used."""
        failure = self.failure
        assert failure is None or isinstance(failure, BpsError)
        return None if failure is None else type(failure)(failure.message, failure.hint)

    def begin_again(self, *, keeps_void: bool = False) -> bool:
        """Returns whether no pass is open.

        It gives up one that the end of a view (RoundAbortedError) has interrupted, or that has failed before this rank
        has sent anything.

        Args:
            keeps_void: not the latter: the other ranks wait for its end.
        """
        if self._pass is not None and self._pass.view != membership.view():
            self._pass.outlast()
            self._pass = None
        elif not keeps_void:
            self.drop_void()
        return self._pass is None

    def drop_void(self) -> bool:
        """Gives up a pass that has failed before this rank has sent anything; returns whether there was one."""
        is_void = self._pass is not None and self._pass.is_void
        if is_void:
            self._pass = None
        return is_void

    def _bytes(self) -> int:
        """Those that a pass has moved at least."""
        return sum(_bytes_of(entry) for unit in self.units if not isinstance(unit, Rows) for entry in unit.entries)

    def _end_pass(self) -> None:
        self._pass, self.passes = None, self.passes + 1  # nothing comes between

    # ---- Between passes

    def compression_state(self) -> dict[str, Any]:
        """Returns the feedback of the units, and which they are; see compression_state.py. A collective call."""
        return self._ordered.compression_state()

    def load_compression_state(self, state: Mapping[str, Any]) -> bool:
        """Goes on with the units of a saved state, and what they remembered. Collective, between passes.

        Returns:
            Whether these are not the units of the beginning: what rebuild() does has been done.
        """
        rebuilt = self._ordered.load_compression_state(state)
        self._unrounded.drop_units()
        return rebuilt

    def rebuild(self, arrived: list[IndexedParameter]) -> None:
        """Fills the buckets anew in the order in which gradients became ready on the group's first rank.

        Every rank of the group calls it, between passes. Strategies without eager buckets ignore it.

        Args:
            arrived: the parameters in the order in which their gradients became ready in a whole pass on this rank.
        """
        if self._ordered.rebuild(arrived):
            self._unrounded.drop_units()

    def meet(self, rebuilds: bool) -> None:
        """Meets the other ranks at the beginning of a pass, which does not take place; the same call on all of them.

        Args:
            rebuilds: the pass would begin with rebuild().

        Raises:
            MismatchError: another rank has begun the pass, which fails there, too.
        """
        if rebuilds and self._ordered.can_be_rebuilt:  # others come no further
            self._ordered.meet()
            return
        error: MismatchError | None = None
        self._unrounded.meet()
        flags = [] if self._unused is None else [self._unused.declared]
        for number, (name, shape, dtype, device) in enumerate([*flags, *self._ordered.declared]):
            options = OperationOptions(ReduceOp.max, name, group=self.sent.group, awaited=True)
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            try:
                transfer.all_reduce(zeros, options, in_order=self.sent.in_order).wait()
            except MismatchError as caught:
                error = error or caught
                if self._strategy.one_by_one and number >= len(flags):
                    break  # there the others end with their first one
        if error is not None:
            raise error

    def lie_contiguous(self) -> None:
        """Lays gradients in buckets one row after the other, because their order in memory differs between ranks.

        Buckets are summed as they lie. To be called before the first pass.
        """
        for entry in self.entries:
            entry.strides = None
        for unit in self.units:
            if isinstance(unit, Bucket):
                unit.lay_out()

    def close(self) -> None:
        """Gives back what was made for the parameters; other units take their place."""
        self._ordered.close()
        for hook in self.hooks:
            hook.remove()


def _bytes_of(entry: IndexedParameter) -> int:
    return entry.parameter.numel() * entry.parameter.itemsize // returned.sharers()


def _sizes_for(entries: Iterable[IndexedParameter], sparse: frozenset[str]) -> BucketSizes:
    dense = [entry.parameter for entry in entries if entry.name not in sparse]
    on_device = any(transfer.device_of(parameter) is not None for parameter in dense)
    return bucket_sizes(sum(parameter.numel() * parameter.dtype.itemsize for parameter in dense), on_device)

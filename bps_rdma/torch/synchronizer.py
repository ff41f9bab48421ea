# SPDX-License-Identifier: Apache-2.0
"""The engine of all data parallelism here: averages gradients over the ranks as backward completes them.

A pass begins with the first gradient of a backward and ends with finish(), after which every parameter's .grad is the
average over the group. Gradients are sent in units (units.py), according to a strategy (plan.py). Parameters that the
next forward needs first have the highest priority.

Ranks need not agree on which parameters they used: a parameter without a gradient here counts as zeros, and stays
without one when no rank had one, as it would in a single process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group, Handle, job
from bps_rdma.arrays import Dtype
from bps_rdma.errors import BpsError, InvalidTensorError, MismatchError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.options import EXACT
from bps_rdma.spans import spans
from bps_rdma.torch import compression_state, transfer
from bps_rdma.torch.accumulation import Accumulation, UnroundedUnit
from bps_rdma.torch.checks import check_exact, check_number, check_parameter
from bps_rdma.torch.plan import StrategyName, Unit, strategy_of, units_of
from bps_rdma.torch.ranges import noted
from bps_rdma.torch.sparse import Rows
from bps_rdma.torch.units import Bucket, IndexedParameter, Sent, Single


class SynchronizerOptions(TypedDict, total=False):
    """The keywords of GradientSynchronizer, for those that make one anew when other parameters are trained."""

    strategy: StrategyName
    bucket_mb: float
    compression: str | None
    group: Group | None
    find_unused: bool
    accumulates: bool | None
    sparse: frozenset[str]


class GradientSynchronizer:
    """Averages gradients of the given parameters.

    Args:
        named: (name, parameter); names are the same on all ranks, and unique.
        prefix: of all names; unique in the job.
        strategy: "naive", "flat", "overlap" or "bucketed".
        bucket_mb: size of buckets, 2^20 bytes.
        compression: the text of the method; see OperationOptions.
        group: who takes part; None: all workers.
        find_unused: leave parameters that no rank used without a gradient; without buckets, and where they are
            compressed, this needs one small operation per pass. False: such parameters get zeros there.
        accumulates: where sums are exact, whether gradients of several backward passes are added before they are sent,
            on all ranks; None: the ranks tell each other in each pass, by one small operation. See accumulation.py.
        sparse: names of the parameters whose gradients are sparse, the same on all ranks; see sparse.py.

    Raises:
        InvalidTensorError: a parameter's dtype, layout or device is not supported; names it.
        MismatchError: ranks disagree about the parameters.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        prefix: str,
        strategy: StrategyName = "bucketed",
        bucket_mb: float = 25.0,
        compression: str | None = None,
        group: Group | None = None,
        find_unused: bool = True,
        accumulates: bool | None = False,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        check_number("bucket_mb", bucket_mb, 0)
        self.entries = [IndexedParameter(index, name, parameter) for index, (name, parameter) in enumerate(named)]
        for entry in self.entries:
            check_parameter(entry.name, entry.parameter)
        self.open = False  # between the first gradient of a pass and its end
        self._epoch = 0  # the view in which the pass began
        self._spans = spans()
        self.exposed_s = 0.0  # seconds spent waiting in finish(), all passes together
        self.passes = 0
        self._strategy = strategy_of(strategy)
        self._bucket_bytes = bucket_mb * 2**20
        running = job.current()
        method = running.compression(Dtype.float32, 1 << 60, compression)
        compressed = method not in ("", EXACT)
        self.sent = Sent(prefix, group, compression, running.min_compress_bytes, keeps_flags=not compressed)
        self.is_exact = method == EXACT
        self._sparse = sparse
        if self.is_exact:
            check_exact(self.entries, sparse)
        # Empty unless sums are exact and something accumulates.
        self._accumulations: dict[IndexedParameter, Accumulation] = {}
        self.hooks: list[Any] = []  # to be removed when this object goes
        self.accumulate(accumulates)
        self._asked: Handle[Any] | None = None  # has any rank accumulated?
        self._unrounded: bool | None = None  # the answer for this pass
        self._held: list[Unit] = []  # ready to be sent, while there is no answer
        self._taken: set[IndexedParameter] = set()
        self._generation = 0
        self._arrived: list[IndexedParameter] = []  # in this pass, in order
        self._seen: set[IndexedParameter] = set()
        self._started: dict[Unit, Unit | UnroundedUnit] = {}  # in order: what was sent for it
        self._flags = None
        if find_unused and self.entries and (compressed or not self._strategy.buckets):
            self._flags = bps_rdma.empty(len(self.entries), "bool")
            if compressed:  # before the buckets, always: which server sums what follows from the order of names
                bps_rdma.declare(f"{prefix}.used", self._flags, group=group)
        self._flags_handle: Handle[Any] | None = None
        self._unused_entries: list[IndexedParameter] = []
        self._declared: list[tuple[str, torch.Size, torch.dtype, torch.device]] = []
        self._use(list(reversed(self.entries)))

    def _use(self, order: list[IndexedParameter]) -> None:
        for unit in getattr(self, "units", ()):
            unit.close()
        self.units = units_of(order, self._strategy, self._bucket_bytes, self._generation, self.sent, self._sparse)
        self._unit_of = {entry: unit for unit in self.units for entry in unit.entries}
        self._left = {unit: len(unit.entries) for unit in self.units}
        self._unrounded_units: dict[Unit, UnroundedUnit] = {}  # made when they are needed
        declared: dict[str | None, dict[str, torch.Tensor]] = {}  # by compression
        self._declared = []  # parameters may have another dtype one day; see meet()
        for name, tensor, compression in (unit.declaration() for unit in self.units):
            declared.setdefault(compression, {})[name] = tensor
            self._declared.append((name, tensor.shape, tensor.dtype, tensor.device))
        for compression, tensors in declared.items():
            transfer.declare_many(tensors, self.sent.group, compression)

    # ---- A pass

    def begin(self) -> None:
        """Opens a pass, if none is open: also when there is no gradient here, other ranks may have some."""
        if not self.open:
            self._epoch = job.current().epoch
            self._spans = spans()
            self._spans.step = self.passes
            self._unrounded = self._accumulates if self.is_exact else False
            if self._unrounded is None:
                mine = np.array([any(one.pending for one in self._accumulations.values())])
                self._asked = bps_rdma.push_pull_async_inplace(
                    mine, name=f"{self.sent.prefix}.accumulated", priority=1, group=self.sent.group, op="max"
                )
            self.open = True

    def accumulate(self, accumulates: bool | None) -> None:
        """Sets `accumulates` anew, between passes."""
        self._accumulates = accumulates
        if self.is_exact and accumulates is not False and not self._accumulations:
            self._accumulations = {entry: Accumulation(entry) for entry in self.entries}
            self.hooks.extend(one.hook for one in self._accumulations.values())

    def accumulated(self, entry: IndexedParameter, accumulates: bool) -> None:
        """Autograd has added a gradient to .grad: to be called for each one, before ready().

        Args:
            accumulates: more passes follow before gradients are sent.
        """
        if self._accumulations:
            self._accumulations[entry].after(accumulates)

    def ready(self, entry: IndexedParameter) -> None:
        """The gradient of a parameter is complete. Sends its unit if that has all its gradients now.

        Raises:
            BpsError: it has been sent already: backward computed two gradients of this parameter.
            InvalidTensorError: it is sparse.
        """
        self.begin()
        if self._spans.is_on:
            now = time.monotonic_ns()
            self._spans.add(f"gradient ready: {entry.name}", now, now)
        unit = self._unit_of[entry]
        gradient = entry.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided and not isinstance(unit, Rows):
            raise InvalidTensorError(
                f"the gradient of {entry.name!r} is sparse, which was not known when the ranks agreed on what to send",
                f"pass sparse=[{entry.name!r}] to DistributedOptimizer, or make its layer with sparse=False",
            )
        if entry in self._seen:
            if unit in self._started:
                raise BpsError(
                    f"backward computed the gradient of {entry.name!r} twice, the second time after it had been sent",
                    "checkpoint with use_reentrant=False, or use strategy='flat', which sends after backward",
                )
            self._take(unit, entry)
            return
        self._seen.add(entry)
        self._arrived.append(entry)
        self._take(unit, entry)
        self._left[unit] -= 1
        if self._left[unit] == 0 and self._strategy.eager:
            self._held.append(unit)
        if self._held and self._knows(waits=False):
            held, self._held = self._held, []
            for one in held:
                self._start(one)

    def _take(self, unit: Unit, entry: IndexedParameter) -> None:
        # The unit must learn now in which stream of a device the gradient is computed.
        on_device = self._asked is not None and transfer.device_of(entry.parameter) is not None
        if self._knows(waits=on_device) and not self._unrounded:
            self._taken.add(entry)
            unit.take(entry)

    def _knows(self, *, waits: bool) -> bool:
        """True if it is known whether this pass sends unrounded sums."""
        if self._asked is not None and (waits or self._asked.done()):
            asked, self._asked = self._asked, None
            self._unrounded = bool(asked.wait()[0])
        return self._unrounded is not None

    def complete(self) -> None:
        """Sends all units that have not been sent yet: backward is over."""
        self.begin()
        if self._flags is not None:
            for entry in self.entries:
                self._flags[entry.index] = entry.parameter.grad is not None
            self._flags_handle = bps_rdma.push_pull_async_inplace(
                self._flags, f"{self.sent.prefix}.used", average=False, priority=1, group=self.sent.group
            )
        self._knows(waits=True)
        for unit in self.units:
            if unit in self._started:
                continue
            self._start(unit)
            if self._strategy.one_by_one:
                self._started[unit].wait()

    def _start(self, unit: Unit) -> None:
        sends: Unit | UnroundedUnit = unit
        if self._unrounded:
            if unit not in self._unrounded_units:
                assert isinstance(unit, Single | Bucket)  # check_exact() refuses others
                self._unrounded_units[unit] = UnroundedUnit(unit, self._accumulations, self.sent)
            sends = self._unrounded_units[unit]
        else:
            for entry in unit.entries:  # those of an earlier backward, which was not synchronised, too
                if entry not in self._taken and entry.parameter.grad is not None:
                    unit.take(entry)
        with noted(self._spans, f"launch {unit.name}"):
            sends.start()
        self._started[unit] = sends  # only now: what could not be started is not waited for

    def finish(self) -> None:
        """Ends the pass: all .grad are averages then. Without a pass this has no effect.

        Raises:
            PeerLostError, DeadlineError: once no operation is in progress; the gradients are then undefined.
            RoundAbortedError: the same on every rank that is left; repeat the step.
        """
        if not self.open:
            return
        begin = time.perf_counter()
        try:
            with noted(self._spans, "wait for gradients"):
                self.complete()
                self._wait_for_all()
                bps_rdma.commit(self.sent.group)  # or some ranks would use gradients that others have not got
        finally:
            self._reset()
            self.exposed_s += time.perf_counter() - begin
            self.passes += 1

    def _wait_for_all(self) -> None:
        error: Exception | None = None
        # The order of the units is the same on all ranks, and that of sending is not. Unrounded units may have to
        # exchange more, which takes all ranks at once.
        for unit in () if self._strategy.one_by_one else [self._started[u] for u in self.units if u in self._started]:
            try:
                unit.wait()
            except Exception as caught:
                error = error or caught
        if error is not None:
            raise error
        for unit in self._started.values():
            unit.deliver()
        unused = (entry for unit in self._started.values() for entry in unit.unused_everywhere())
        for entry in [*self._unused(), *unused]:
            entry.parameter.grad = None

    def _unused(self) -> list[IndexedParameter]:
        """The parameters outside of buckets that no rank used; waits for the ranks' flags once per pass."""
        if self._flags_handle is not None:
            handle, self._flags_handle = self._flags_handle, None
            used = handle.wait()
            self._unused_entries = [self.entries[index] for index in np.flatnonzero(~used)]
        return self._unused_entries

    # ---- A pass that ends without waiting: single means are taken when they are needed

    def finish_later(self) -> None:
        """Sends all units that have not been sent, and ends the pass without waiting; take_mean() gives the means."""
        self.complete()
        flags = self._flags_handle
        self._reset()
        self._flags_handle = flags
        self.passes += 1

    def take_mean(self, entry: IndexedParameter) -> torch.Tensor | None:
        """The mean of one gradient of the last pass; None when no rank had one. Once per pass, after finish_later().

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradient in time; names it.
        """
        unit: Unit | UnroundedUnit = self._unit_of[entry]
        assert isinstance(unit, Single)
        if self.is_exact and self._accumulates:
            unit = self._unrounded_units[unit]
        begin = time.perf_counter()
        with noted(self._spans, "wait for gradients"):
            unit.wait()
            unused = self._unused()
        self.exposed_s += time.perf_counter() - begin
        mean = unit.release()
        return None if entry in unused else mean

    def begin_again(self) -> bool:
        """Returns whether no pass is open; gives up one that the end of a view (RoundAbortedError) has interrupted."""
        if self.open and self._epoch != job.current().epoch:
            for unit in self._started.values():
                with contextlib.suppress(BpsError):
                    unit.wait()
            self._reset()
        return not self.open

    def _reset(self) -> None:
        self.open = False
        self._arrived = []
        self._seen = set()
        self._started = {}
        self._taken = set()
        self._held = []
        self._asked = None
        self._flags_handle = None
        self._left = {unit: len(unit.entries) for unit in self.units}

    # ---- Between passes

    def compression_state(self) -> dict[str, Any]:
        """Returns the feedback of the units, and which they are; see compression_state.py. A collective call."""
        return compression_state.save(self.units, self.sent, self._generation)

    def load_compression_state(self, state: Mapping[str, Any]) -> bool:
        """Goes on with the units of a saved state, and what they remembered. Collective, between passes.

        Returns:
            Whether these are not the units of the beginning: what rebuild() does has been done.
        """
        ordered = compression_state.order(state, self.entries)
        rebuilt = int(state["generation"]) > 0
        if rebuilt:
            self.rebuild(ordered)
        compression_state.load(state, self.units, self.sent)
        return rebuilt

    def rebuild(self, arrived: list[IndexedParameter]) -> None:
        """Fills the buckets anew in the order in which gradients became ready on the group's first rank.

        Every rank of the group calls it, between passes. Strategies without eager buckets ignore it.

        Args:
            arrived: the parameters in the order in which their gradients became ready in a whole pass on this rank.
        """
        if not (self._strategy.buckets and self._strategy.eager):
            return
        order = np.array([entry.index for entry in arrived], dtype="int64")
        missing = np.setdiff1d(np.arange(len(self.entries)), order)
        order = np.concatenate([order, missing])
        root = self.sent.group.ranks[0] if self.sent.group else 0
        bps_rdma.broadcast(order, self._order_name, root=root, group=self.sent.group)
        ordered = [self.entries[index] for index in order]
        if ordered != [entry for unit in self.units for entry in unit.entries]:
            self._generation += 1
            self._use(ordered)

    @property
    def _order_name(self) -> str:
        return f"{self.sent.prefix}.order {self._generation}"

    def meet(self, rebuilds: bool) -> None:
        """Meets the other ranks at the beginning of a pass, which does not take place; the same call on all of them.

        Args:
            rebuilds: the pass would begin with rebuild().

        Raises:
            MismatchError: another rank has begun the pass, which fails there, too.
        """
        if rebuilds and self._strategy.buckets and self._strategy.eager:  # others come no further
            bps_rdma.push_pull(np.zeros(len(self.entries), np.int64), name=self._order_name, group=self.sent.group)
            return
        error: MismatchError | None = None
        if self.is_exact and self._accumulates is None:
            bps_rdma.push_pull(
                np.zeros(1, bool), name=f"{self.sent.prefix}.accumulated", group=self.sent.group, op="min"
            )
        flags = f"{self.sent.prefix}.used"
        declared = list(self._declared)
        if self._flags is not None:
            declared.insert(0, (flags, torch.Size([len(self.entries)]), torch.bool, torch.device("cpu")))
        for name, shape, dtype, device in declared:
            options = OperationOptions(ReduceOp.max, name, group=self.sent.group, awaited=True)
            try:
                transfer.all_reduce(torch.zeros(shape, dtype=dtype, device=device), options).wait()
            except MismatchError as caught:
                error = error or caught
                if self._strategy.one_by_one and name != flags:
                    break  # there the others end with their first one
        if error is not None:
            raise error

    def close(self) -> None:
        """Gives back what was made for the parameters; other units take their place."""
        for unit in self.units:
            unit.close()
        for hook in self.hooks:
            hook.remove()

    @property
    def arrived(self) -> list[IndexedParameter]:
        """The parameters whose gradients have become ready in this pass, in order."""
        return self._arrived

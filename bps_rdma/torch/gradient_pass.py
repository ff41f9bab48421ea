# SPDX-License-Identifier: Apache-2.0
"""One pass of a GradientSynchronizer: takes gradients as they become ready, sends their units, waits for the means."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bps_rdma.errors import BpsError, InvalidTensorError, MismatchError, RefusedError, RoundAbortedError
from bps_rdma.handle import wait_each
from bps_rdma.kept_errors import keeping
from bps_rdma.operations.begun import give_up, of_thread
from bps_rdma.spans import Spans
from bps_rdma.torch import early_steps, membership, transfer
from bps_rdma.torch.accumulation import UnroundedUnit
from bps_rdma.torch.ordered_units import OrderedUnits
from bps_rdma.torch.plan import Strategy, Unit
from bps_rdma.torch.ranges import noted
from bps_rdma.torch.refused import Refused
from bps_rdma.torch.sparse import Rows
from bps_rdma.torch.units import Bucket, IndexedParameter, Single
from bps_rdma.torch.unrounded_passes import UnroundedPasses
from bps_rdma.torch.unused import UnusedParameters


class GradientPass:
    """Begins with this object: also when there is no gradient here, other ranks may have some.

    It owns what it has begun: give_up() ends that for all ranks. The ranks match operations by their order. So a pass
    in which something is raised is not over before it has sent all that the others send, or nothing; complete() then
    goes on with the rest. What this rank cannot compute or send any more it refuses, and no rank gets means: zeros in
    their place would be means of other gradients on the other ranks.

    Args:
        units: in which gradients are sent.
        strategy: when.
        unrounded: knows whether this pass sends unrounded sums.
        unused: finds the parameters that no rank used; None: the units know, or all parameters must be used.
        must_use: the parameters of which this pass must use all, or none.
        noted_by: spans of what happens.
        arrives: the parameter whose gradient begins it; None: finish() does.
    """

    def __init__(
        self, units: OrderedUnits, strategy: Strategy, unrounded: UnroundedPasses, unused: UnusedParameters | None,
        must_use: Sequence[IndexedParameter], noted_by: Spans, arrives: IndexedParameter | None,
    ) -> None:  # fmt: skip
        self._units, self._strategy, self._unrounded, self._unused = units, strategy, unrounded, unused
        self._must_use, self._spans = must_use, noted_by
        self.view = membership.view()  # in which it began
        self.arrived: list[IndexedParameter] = []  # in order
        self._seen: set[IndexedParameter] = set()
        self._taken: set[IndexedParameter] = set()
        self._left = {unit: len(unit.entries) for unit in units.units}
        self._held: list[Unit] = []  # ready to be sent, while it is not known whether unrounded
        self._in_turn = deque(units.in_order)
        self._begun: list[Any] = []  # handles
        self._sent: dict[str, Any] = {}  # by name, in order: what was sent, to be waited for
        self._torn: str | None = None  # the name of what was interrupted when it had begun
        self._waited: set[Unit] = set()
        self._has_failed = False  # on all ranks, before all was sent
        self._is_computed = False  # backward has come to its end
        self.is_cut = False  # it has failed before
        self.refused: dict[Unit, Refused] = {}
        self.failure: Exception | None = None  # why this rank has refused units
        self._own = weakref.ref(self)
        self._claimed: list[int] = []  # ids of the parameters whose gradients it is averaging
        self._not_used: list[IndexedParameter] = []  # of those that must be
        for unit in units.units:
            unit.begin(arrives)
        self._send("accumulated", unrounded, unrounded.begin)

    def _send(self, name: str, what: Any, start: Callable[[], None]) -> None:
        """Starts an operation, or none. What a signal handler raises may come when it has begun."""
        outer, before = of_thread.begun, len(self._begun)
        self._sent[name] = what
        try:
            of_thread.begun = self._begun
            start()
        except BaseException:
            del self._sent[name]  # what could not be started is not waited for
            if len(self._begun) > before:
                self._sent[name], self._torn = self._begun[-1], name
            raise
        finally:
            of_thread.begun = outer

    def ready(self, entry: IndexedParameter) -> None:
        """See GradientSynchronizer.ready()."""
        if self._spans.is_on:
            now = time.monotonic_ns()
            self._spans.add(f"gradient ready: {entry.name}", now, now)
        unit = self._units.of(entry)
        if self.is_cut and self.has_begun:
            raise BpsError(
                f"{entry.name!r} got another gradient, and the last backward has failed while gradients were averaged",
                "call synchronize() on this rank first; if that returns, all ranks have means, and step",
            )
        if early_steps.has_stepped_on(entry.parameter) and transfer.members_of(self._units.sent.group).size > 1:
            raise early_steps.error_of_step(entry)
        if entry.parameter.grad is None:
            if isinstance(unit, Rows) or len(entry.parameter._post_accumulate_grad_hooks) > 1:
                raise _dropped(entry)
            # Only our hook is here, so nothing was dropped: a function of the script's own returned None.
            entry.parameter.grad = torch.zeros_like(entry.parameter)
        if entry.parameter.grad.layout is not torch.strided and not isinstance(unit, Rows):
            raise InvalidTensorError(
                f"the gradient of {entry.name!r} is sparse, which was not known when the ranks agreed on what to send",
                f"pass sparse=[{entry.name!r}] to DistributedOptimizer, or make its layer with sparse=False",
            )
        if entry in self._seen:
            if unit.name in self._sent:
                raise BpsError(
                    f"backward computed the gradient of {entry.name!r} twice, the second time after it had been sent",
                    "checkpoint with use_reentrant=False, or use strategy='flat', which sends after backward",
                )
            self._take(unit, entry)
            return
        self._seen.add(entry)
        self.arrived.append(entry)
        self._take(unit, entry)
        self._left[unit] -= 1
        if self._left[unit] == 0 and self._strategy.eager:
            self._held.append(unit)
        if self._held and self._unrounded.is_known(waits=False):
            for one in self._take_due():
                self._start(one)

    def _take_due(self) -> list[Unit]:
        """Those held back whose turn it is: all, or where the order counts those behind which none is missing."""
        due = [unit for unit in self._held if unit not in self._in_turn]
        while self._in_turn and self._in_turn[0] in self._held:
            due.append(self._in_turn.popleft())
        self._held = [unit for unit in self._held if unit not in due]
        return due

    def _take(self, unit: Unit, entry: IndexedParameter) -> None:
        # The unit must learn now in which stream of a device the gradient is computed.
        on_device = self._unrounded.is_asking and transfer.device_of(entry.parameter) is not None
        if self._unrounded.is_known(waits=on_device) and not self._unrounded.sends_unrounded:
            unit.take(entry)
            self._taken.add(entry)

    def complete(self, *, refuses: bool = False) -> None:
        """Sends all units that have not been sent yet: backward is over.

        Args:
            refuses: where this rank cannot send some, no rank gets means, and wait() raises the error.
        """
        self._is_computed = not self.is_cut
        try:
            self._complete_or_refuse() if refuses else self._complete()
        except BaseException as error:
            self._has_failed = self._has_failed or isinstance(error, RoundAbortedError)
            self.end_claims()  # the error may keep this pass alive while the script tries once more
            raise

    def _complete_or_refuse(self) -> None:
        if self.is_cut and self._unsent():
            cut = RefusedError(
                f"backward() failed before the gradient of {self.unfinished!r} was sent",
                "zero the gradients, and repeat the step",
            )
            if self._has_failed:
                raise cut
            self.failure = cut  # not raised before the others know: raised here, it would refer to what backward used
            self._complete_units()
            return
        try:
            self._complete()
        except Exception as error:
            is_of_all = self._has_failed or isinstance(error, RoundAbortedError)
            if is_of_all or not self._unsent() or not (self.has_begun or self.is_cut):
                raise
            self.failure = error
            if isinstance(error, MismatchError):  # of this rank alone; of others the ranks tell each other why
                self.failure = BpsError(error.message, error.hint)
                self.failure.__cause__ = error
            self._complete_units()

    def _complete(self) -> None:
        for entry in self.arrived:
            if entry.parameter.grad is None and self._units.of(entry).name not in self._sent:
                raise _dropped(entry)
        self._complete_units()

    def _complete_units(self) -> None:
        self._not_used = [entry for entry in self._must_use if entry.parameter.grad is None and entry not in self._seen]
        if self._unused is not None and self._unused.name not in self._sent:
            self._send(self._unused.name, self._unused, self._unused.ask)
        self._wait_for(lambda: self._unrounded.is_known(waits=True))
        for unit in self._units.units:
            if unit.name not in self._sent:
                self._start(unit)
            if self._strategy.one_by_one and unit not in self._waited:
                self._wait_for(self._sent[unit.name].wait)
                self._waited.add(unit)

    def _wait_for(self, wait: Callable[[], object]) -> None:
        """Waits for something before more is sent. If it fails, no rank sends more."""
        try:
            wait()
        except BpsError:
            self._has_failed = True
            raise

    def _start(self, unit: Unit) -> None:
        if self.failure is not None:
            self._refuse(unit)
            return
        if not isinstance(unit, Rows):  # those are averaged elsewhere than where they lie
            self._claim(unit)
        sends: Unit | UnroundedUnit = unit
        if self._unrounded.sends_unrounded:
            assert isinstance(unit, Single | Bucket)  # check_exact() refuses others
            sends = self._unrounded.in_place_of(unit)
        else:
            for entry in unit.entries:  # those of an earlier backward, which was not synchronised, too
                if entry not in self._taken and entry.parameter.grad is not None:
                    unit.take(entry)
        with noted(self._spans, f"launch {unit.name}"):
            self._send(unit.name, sends, sends.start)

    def _refuse(self, unit: Unit) -> None:
        sends: Unit | UnroundedUnit = unit
        if self._unrounded.sends_unrounded:
            assert isinstance(unit, Single | Bucket)
            sends = self._unrounded.in_place_of(unit)
        refused = self.refused[unit] = Refused(sends, self._units.sent)
        self._send(unit.name, refused, refused.start)

    def _claim(self, unit: Unit) -> None:
        """Takes the gradients of a unit for this pass, until they are means."""
        for entry in unit.entries:
            key = id(entry.parameter)
            found = _passes.get(key, self._own)
            if found is not self._own and found() is not None:
                gc.collect()  # a wrapper that the script has dropped may refer to itself
                if found() is not None:
                    raise BpsError(
                        f"the gradient of {entry.name!r} is being averaged for another wrapper already",
                        "wrap the model or its optimizer, not both; two wrapped models must not share parameters",
                    )
            _passes[key] = self._own
            self._claimed.append(key)

    def end_claims(self) -> None:
        """Another pass may average the same gradients."""
        for key in self._claimed:
            _passes.pop(key, None)
        self._claimed.clear()

    def wait(self) -> None:
        """Waits for all units, and makes the means the gradients.

        Raises:
            BpsError: this rank used some parameters only, and nothing tells whether others used the rest.
        """
        # The order of the units is the same on all ranks, and that of sending is not. Unrounded units may have to
        # exchange more, which takes all ranks at once.
        ordered = [self._sent[unit.name] for unit in self._units.units]
        waits = [sent.wait for unit, sent in zip(self._units.units, ordered, strict=True) if unit not in self._waited]
        if self._unused is not None:  # an error of this rank alone must not give up what tells the others
            waits.append(self._unused.wait)
        try:
            # All ranks get a mismatch, and tell each other why. So it comes before errors of this rank alone.
            wait_each([*waits, self._check_torn], MismatchError)
            self._check_refused()
        finally:
            self.end_claims()
        for sent in ordered:
            sent.deliver(restores=self.is_cut)  # a script zeroes gradients when backward has failed
        unused = [entry for sent in ordered for entry in sent.unused_everywhere()]
        if self._unused is not None:
            unused += self._unused.found()
        for entry in (*unused, *self.frozen):
            entry.parameter.grad = None
        error = self.error_of_unused()
        if error is not None:
            raise error

    @property
    def frozen(self) -> list[IndexedParameter]:
        """Those that must be used and have no gradient here, but are not trained any more; once all is sent."""
        return [entry for entry in self._not_used if not entry.is_trained]

    def error_of_unused(self) -> BpsError | None:
        """What is to be raised if this rank used some of the parameters only that must be used; once all is sent."""
        missing = [entry for entry in self._not_used if entry.is_trained]
        if not missing or not self.arrived:  # a rank that used none lets the others train, as in join()
            return None
        return BpsError(
            f"backward gave no gradient to {_names_of(missing)}",
            "pass find_unused_parameters=True, or strategy='bucketed' without compression, which needs no flag",
        )

    def _check_torn(self) -> None:
        if self._torn is not None:
            raise BpsError(f"{self._torn!r} was interrupted when it had been sent", "repeat the step")

    def _check_refused(self) -> None:
        failure = self.take_failure()
        if failure is not None:  # there is no other rank
            try:
                raise failure
            finally:
                del failure

    def take_failure(self) -> Exception | None:
        """Why this rank has refused units. Nobody may keep it: its traceback refers to what backward used."""
        failure, self.failure = self.failure, None
        return failure

    @property
    def has_begun(self) -> bool:
        """Whether anything has been sent."""
        return bool(self._begun) or len(self._unsent()) < len(self._units.units)

    @property
    def is_over(self) -> bool:
        """Whether what this rank sends next belongs to another pass, on all ranks."""
        return self._has_failed or not self._unsent()

    def _unsent(self) -> list[Unit]:
        return [unit for unit in self._units.units if unit.name not in self._sent]

    @property
    def unfinished(self) -> str:
        """The name of a parameter whose gradient is not a mean yet."""
        return (self._unsent() or self._units.units)[0].entries[0].name

    @property
    def is_void(self) -> bool:
        """Whether backward has failed before this rank has sent anything: the other ranks wait for its next pass."""
        return self.is_cut and not self.has_begun

    def give_up(self) -> None:
        """Ends what is in progress, on all ranks: from now on nothing writes to gradients."""
        self.is_cut = not self._is_computed
        self.end_claims()
        give_up(list(self._begun))
        if self.is_cut and not self._unsent():  # other ranks may have the means
            for sent in self._sent.values():
                if isinstance(sent, Single | Bucket):  # others keep them beside .grad
                    sent.keep()

    def outlast(self) -> None:
        """Waits for what is in progress, without its results: the view has ended."""
        for unit in self._units.units:
            if unit.name in self._sent:
                with contextlib.suppress(BpsError), keeping:  # it may say that this view has ended, too
                    self._sent[unit.name].wait()
        self.end_claims()


# By id of a parameter: the pass that is averaging its gradient, unless it has been dropped.
_passes: dict[int, weakref.ref[GradientPass]] = {}


def _dropped(entry: IndexedParameter) -> BpsError:
    return BpsError(
        f"the gradient of {entry.name!r} was dropped in a hook, before it was averaged",
        "make the step of the optimizer when backward() has returned, not in a hook",
    )


def _names_of(entries: Sequence[IndexedParameter]) -> str:
    """Some names; not those of a whole model."""
    shown = ", ".join(repr(entry.name) for entry in entries[:3])
    return f"{shown} and {len(entries) - 3} more" if len(entries) > 3 else shown

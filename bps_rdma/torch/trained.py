# SPDX-License-Identifier: Apache-2.0
"""Holds the parameters that are trained, with hooks on them, and makes the averaging anew when they become others.

Parameters may train later than the wrapper was made: unfrozen, added, replaced, or of another dtype or shape. At the
beginning of each pass every rank looks at its own. One that finds something new tells the other ranks, which must have
found the same: then gradients are averaged from this pass on. Otherwise all of these ranks raise an error. In the first
pass all ranks compare what they train, and its values: a script may have forgotten to broadcast them. So they do in the
first pass of a view that a rank has entered or resumed: it may not have taken over the state of the others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group, job
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError, MismatchError, RefusedError
from bps_rdma.torch import membership
from bps_rdma.torch.check_alike import check_alike, digest_of, digest_of_some, tensor_line
from bps_rdma.torch.checks import check_parameter
from bps_rdma.torch.membership import View, unique, view
from bps_rdma.torch.synchronizer import GradientSynchronizer
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.units import IndexedParameter, strides_of
from bps_rdma.torch.wrapping import remove_hooks

Method = Callable[[torch.nn.Parameter], None]
_BROADCAST = "make the same model on all ranks, and call broadcast_parameters() before you train it"
_SYNC = "the ranks have changed: call sync() of a TrainingState before each step"
Named = Iterable[tuple[str, torch.nn.Parameter]]
_Look = tuple[list[int], list[Any]]  # ids of parameters, and of each what counts


class TrainedParameters:
    """The parameters that an owner trains, as they are now.

    Args:
        owner: its end removes all hooks.
        kind: of the owner: the first word of all names.
        make: gives what averages the gradients of (name, parameter) pairs, under names with a prefix.
        arrived: a method of the owner: the gradient of this parameter has been accumulated.
        group: who takes part; None: all workers.
        options: lines with those that must be the same on all ranks.
        computed: a method of the owner: a gradient of this parameter has been computed; None: it need not know.
    """

    def __init__(
        self,
        owner: object,
        kind: str,
        make: Callable[[Named, str], GradientSynchronizer],
        arrived: Method,
        group: Group | None,
        options: Sequence[str],
        computed: Method | None = None,
    ) -> None:
        self._kind, self._make, self._group, self._options = kind, make, group, options
        self._arrived = _tell(arrived)
        self._computed = None if computed is None else _tell(computed)
        self._hooked: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        self._hooks: list[Any] = []
        self._made: GradientSynchronizer | None = None
        self._entries: dict[int, IndexedParameter] = {}  # by id of the parameter
        self._kinds: dict[int, tuple[object, ...]] = {}  # likewise, when the entry was made
        self._seen: _Look = [], []  # in the last pass
        self._kept: Sequence[torch.nn.Parameter] = ()  # those, whose ids nothing else must get
        self._prefix: str | None = None
        self._changes = 0  # in this view
        self._view: View | None = None  # in which that is so
        self._agreed = False  # all ranks have compared what they train
        self._alike = False  # they had the same values at first
        self._first: dict[str, str] = {}  # their digests, where a rank has gradients of its own before that
        weakref.finalize(owner, self.close)

    @contextlib.contextmanager
    def making(self) -> Iterator[str]:
        """Gives the owner its name, while it is made. Ranks make their owners in the same order."""
        try:
            with membership.naming(self._kind, self._group) as self._prefix:
                yield self._prefix
        except BaseException:
            self.close()  # the script may make another one, while this one is kept by the error
            raise

    def begin(self, named: Named, alike: bool = False) -> None:
        """Makes what averages the gradients of those that require them, unless a rank has just entered.

        Args:
            named: all of the owner, trained or not.
            alike: they have the same values on all ranks, unless a rank alone changes them before the first pass.
        """
        self._alike = alike
        pairs = list(named)
        self._kept = [parameter for _, parameter in pairs]
        self.watch(self._kept)
        if not job.current().has_entrants:  # otherwise the first pass agrees on what the others train by now
            self._replace([pair for pair in pairs if pair[1].requires_grad], view())

    def note_values(self, named: Callable[[], Named]) -> None:
        """A pass of this rank alone begins. If it is the first of all, a script may change weights by its gradients."""
        if self._alike and not self._agreed and not self._first:
            self._first = {name: digest_of_some(each) for name, each in named()}

    def forget_values(self) -> None:
        """The owner has other parameters from now on."""
        self._first = {}

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Hooks parameters, also those that do not require gradients yet."""
        for parameter in parameters:
            if self.is_hooked(parameter):
                continue
            if not (parameter.is_floating_point() or parameter.is_complex()) or parameter.is_inference():
                continue  # is never trained
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))  # type: ignore[no-untyped-call]
            if self._computed is not None:
                self._hooks.append(parameter.register_hook(_tell_of(self._computed, parameter)))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(not frozen)
            self._hooked[id(parameter)] = weakref.ref(parameter)

    def is_hooked(self, tensor: torch.Tensor) -> bool:
        """Whether this is a parameter of the owner."""
        known = self._hooked.get(id(tensor))
        return known is not None and known() is tensor

    def close(self) -> None:
        """Removes all hooks: the parameters may outlive the owner, and get another one."""
        remove_hooks(self._hooks)
        if self._made is not None:
            remove_hooks(self._made.hooks)
            self._made.failed.forget()

    @property
    def prefix(self) -> str:
        """The prefix of the names of the owner; a copy gets it at its first use."""
        if self._prefix is None:
            membership.init()
            self._prefix = unique(self._kind, self._group)
        return self._prefix

    @property
    def synchronizer(self) -> GradientSynchronizer:
        """The object that averages the gradients."""
        assert self._made is not None, "before the first pass"
        return self._made

    @property
    def is_made(self) -> bool:
        """True if there is one. A copy, and a process that has entered a running job, have none before a pass."""
        return self._made is not None

    @property
    def is_open(self) -> bool:
        """True if gradients are being averaged."""
        return self._made is not None and self._made.open

    @property
    def passes(self) -> int:
        """The number of passes so far."""
        return 0 if self._made is None else self._made.passes

    def entry_of(self, parameter: torch.nn.Parameter) -> IndexedParameter | None:
        """The entry of a parameter; None: its gradient is not averaged."""
        return self._entries.get(id(parameter))

    # ---- At the beginning of a pass

    def follow(
        self, parameters: Sequence[torch.nn.Parameter], named: Callable[[], Named], rebuilds: bool = False
    ) -> bool:
        """Looks for what has changed since the last pass. All ranks of the group are at the beginning of a pass.

        Args:
            parameters: all of the owner, trained or not.
            named: gives these with their names; called only if something has changed.
            rebuilds: without a change, rebuild() is what follows.

        Returns:
            Whether what averages gradients was made anew: all entries are others.

        Raises:
            MismatchError: ranks train other parameters, or new ones have other values; names the first.
            InvalidTensorError: a parameter cannot be synchronised; names it.
        """
        seen = _look(parameters)
        now = view()
        anew = self._made is None or self._view != now  # nothing has been agreed on
        if seen == self._seen and not anew:
            return False
        self.watch(parameters)
        pairs = list(named())
        wanted = [(name, each) for name, each in pairs if each.requires_grad or id(each) in self._entries]
        new = [(name, each) for name, each in wanted if not self._has(each)]
        lie_alike = True
        if anew or not self._agreed:  # on some ranks perhaps: they have agreed in the view before, or made it just now
            is_known = self._agreed and self._view is not None and self._view[0] == now[0] and not new
            lie_alike = self._agree(wanted, self._strides_of(wanted, made=not (new or anew)), is_new=not is_known)
        elif new:
            self._meet(wanted, rebuilds)
            lie_alike = self._agree_on_new(wanted, new)
        if new or anew:
            self._replace(wanted, now, 0 if anew else self._changes + 1)
        there = set(seen[0])
        for key, entry in self._entries.items():
            entry.belongs = key in there
        if not lie_alike:
            self.synchronizer.lie_contiguous()
        self._agreed = True
        self._seen, self._kept = seen, parameters
        return bool(new or anew)

    def _has(self, parameter: torch.nn.Parameter) -> bool:
        return self._kinds.get(id(parameter)) == _kind(parameter)

    def _meet(self, wanted: Named, rebuilds: bool) -> None:
        try:
            self.synchronizer.meet(rebuilds)
        except MismatchError as error:
            self.explain(error, [tensor_line(name, parameter) for name, parameter in wanted])

    def _strides_of(self, wanted: Named, *, made: bool) -> list[str]:
        """How gradients lie in buckets: those of what was `made` before, or as they will."""
        return [str(self._entries[id(each)].strides if made else strides_of(each)) for _, each in wanted]

    def _agree_on_new(self, wanted: Named, new: Named) -> bool:
        names = {name for name, _ in new}
        lines, failure = self._lines_of(wanted, lambda name, each: digest_of(each) if name in names else "")
        return self._check_alike(lines, "parameters", failure, places=self._strides_of(wanted, made=False))

    def _agree(self, wanted: Named, strides: Sequence[str], is_new: bool) -> bool:
        """Agrees with ranks that may have agreed before. Values are compared only if some rank has not.

        Ranks that have trained together may differ in last bits, because processors and GPUs round differently.

        Args:
            wanted: what this rank trains.
            strides: how their gradients lie in buckets here.
            is_new: this rank has entered or resumed the job, or has not compared everything yet.

        Returns:
            Whether gradients lie alike on all ranks.
        """
        lines, failure = self._lines_of(wanted, lambda *_: "")
        lie_alike = self._check_alike([*self._options, *lines], "parameters", failure, places=strides)
        has_trained = self._agreed or job.current().is_late
        told = np.array([is_new, has_trained or self._alike, bool(self._first)], np.int64)
        new, trained, first = bps_rdma.push_pull(told, f"{self.prefix} new", average=False, group=self._group)
        if new == 0:
            return lie_alike
        whole = trained == 0  # it may take seconds; what one rank has loaded since they were alike shows in some, too
        known = self._first if first == members_of(self._group).size else {}  # or ranks would compare different times
        values, _ = self._lines_of(
            wanted, lambda name, each: digest_of(each) if whole else known.get(name) or digest_of_some(each)
        )
        self._first = {}
        self._check_alike(values, "values", hint=_SYNC if has_trained else _BROADCAST)
        return lie_alike

    def _check_alike(
        self,
        lines: Sequence[str],
        what: str,
        failure: Exception | None = None,
        hint: str = _BROADCAST,
        places: Sequence[str] = (),
    ) -> bool:
        try:
            return check_alike(lines, f"{self.prefix} {what}", self._group, failure, places)
        except MismatchError as error:
            raise MismatchError(error.message, hint) from None

    @staticmethod
    def _lines_of(
        wanted: Named, more: Callable[[str, torch.Tensor], str]
    ) -> tuple[list[str], InvalidTensorError | None]:
        """A line for each parameter, or why there are none."""
        lines = []
        for name, parameter in wanted:
            try:
                check_parameter(name, parameter)
            except InvalidTensorError as error:
                return [], error
            lines.append(", ".join(filter(None, (tensor_line(name, parameter), more(name, parameter.detach())))))
        return lines, None

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        """The name of a parameter in messages."""
        entry = self.entry_of(parameter)
        return "a parameter" if entry is None else entry.name

    # ---- A pass

    def rebuild(self, order: list[IndexedParameter]) -> None:
        """Fills the buckets anew; see GradientSynchronizer.rebuild()."""
        try:
            self.synchronizer.rebuild(order)
        except MismatchError as error:
            self.explain(error)

    def ready(self, entry: IndexedParameter) -> None:
        """The gradient of a parameter is complete; see GradientSynchronizer.ready()."""
        try:
            self.synchronizer.ready(entry)
        except MismatchError as error:
            self.explain(error)

    def take_mean(self, parameter: torch.nn.Parameter, *, explains: bool) -> torch.Tensor | None:
        """The mean of one gradient of the last pass; see GradientSynchronizer.take_mean().

        Args:
            explains: where it does not come, the ranks tell each other why: once in a pass, on all of them.
        """
        entry = self.entry_of(parameter)
        if entry is None:
            return None
        try:
            return self.synchronizer.take_mean(entry)
        except MismatchError as error:
            if not explains:
                raise
            self.explain(error, failure=self.synchronizer.failure_anew())

    def finish(self) -> None:
        """Begins a pass if none is open, and ends it: all gradients are means then.

        Raises:
            MismatchError: ranks train different parameters; names the first. RefusedError: a rank has refused to send
                gradients; says why. Others: see GradientSynchronizer.finish().
        """
        self.synchronizer.begin()
        try:
            self.synchronizer.finish()
        except MismatchError as error:
            self.explain(error, failure=self.synchronizer.take_failure())
        finally:
            self.synchronizer.take_failure()

    def end_backward(self) -> None:
        """A backward has come to its end, of one pass or of those whose gradients are added up."""
        if self._made is not None:
            self._made.failed.end_backward(self._kept)

    def give_up(self) -> None:
        """Backward has failed: what it has sent ends. What it has not sent, and what it has left, no rank gets."""
        if self._made is not None:
            self._made.give_up()
            self._made.failed.note(self._kept)

    def explain(
        self, error: MismatchError, lines: Sequence[str] | None = None, failure: Exception | None = None
    ) -> NoReturn:
        """A pass has failed on all ranks: raises what names a parameter, if they train different ones, or the same.

        Args:
            error: what the pass has raised.
            lines: describe the parameters of this rank; None: those that it trains.
            failure: why this rank has refused to send gradients: raised here, and told to the others.
        """
        if lines is None:
            lines = [tensor_line(entry.name, entry.parameter) for entry in self._entries.values()]
        name = f"{self._prefix} parameters that differ"
        try:
            check_alike(lines, name, self._group, failure)
        except InvalidArgumentError as refused:
            if failure is not None:
                raise
            why = refused.message.removeprefix(f"{name}: ").partition(" (hint: ")[0]
            raise RefusedError(
                f"not all gradients were averaged: {why}", "zero the gradients, and repeat the step"
            ) from error
        except MismatchError as found:
            raise MismatchError(
                f"parameters are trained since this pass, but not on all ranks: {found.message}",
                "unfreeze, add and replace the same parameters on all ranks before the same step",
            ) from error
        else:
            raise error
        finally:
            del error, failure  # their tracebacks keep this frame, and what the script has in those that called it

    def _replace(self, named: Named, entered: View, changes: int = 0) -> None:
        prefix = self.prefix if changes == 0 else f"{self.prefix} ({changes})"
        made, before = self._make(named, prefix), self._made
        if before is not None:
            try:
                made.take_over(before, remembers=changes > 0)
            except BaseException:  # such as the end of a view
                remove_hooks(made.hooks)
                raise
        self._made, self._view, self._changes = made, entered, changes
        self._entries = {id(entry.parameter): entry for entry in made.entries}
        self._kinds = {key: _kind(entry.parameter) for key, entry in self._entries.items()}


def _tell(method: Method) -> Method:
    """A hook that calls the method, if its owner is still there; faster than weakref.WeakMethod."""
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def tell(parameter: torch.nn.Parameter) -> None:
        alive = owner()
        if alive is not None:
            function(alive, parameter)

    return tell


def _tell_of(tell: Method, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    own = weakref.ref(parameter)

    def tell_of(_: torch.Tensor) -> None:
        alive = own()
        if alive is not None:
            tell(alive)

    return tell_of


class ParametersOf:
    """The parameters of a module as they are now, faster than module.parameters() finds them: each step looks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._inner: list[int] = []  # ids of the modules in it
        self._modules: list[Any] = []  # the modules and the parameters of it and of each of these, by name
        self._parameters: list[Any] = []
        self._is_scripted = False  # a module in it is, which keeps neither in dicts

    def now(self) -> list[torch.nn.Parameter]:
        """All of them, each as often as it occurs."""
        if self._is_scripted:
            return list(self._module.parameters())
        if not self._modules or self._inner != _ids(self._modules):
            modules = list(self._module.modules())
            self._is_scripted = any(isinstance(each, torch.jit.ScriptModule) for each in modules)
            if self._is_scripted:
                return list(self._module.parameters())
            self._modules = [each._modules for each in modules]
            self._parameters = [each._parameters for each in modules]
            self._inner = _ids(self._modules)
        return [each for each in chain.from_iterable(map(dict.values, self._parameters)) if each is not None]


def _ids(dicts: list[Any]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, dicts))))


_what_counts = attrgetter("requires_grad", "dtype", "device", "shape")
_kind = attrgetter("dtype", "device", "shape")


def _look(parameters: Sequence[torch.nn.Parameter]) -> _Look:
    return list(map(id, parameters)), list(map(_what_counts, parameters))

# SPDX-License-Identifier: Apache-2.0
"""The passes of a wrapped module: which backward passes count, and when each begins and ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from itertools import islice
from types import MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from bps_rdma.errors import BpsError, RefusedError
from bps_rdma.spans import spans
from bps_rdma.torch.backward import EndOfBackward, adds_to, returned_of
from bps_rdma.torch.joining import UnevenInputs
from bps_rdma.torch.membership import View, view
from bps_rdma.torch.returned import ReturnedGradients
from bps_rdma.torch.seen_gradients import is_used
from bps_rdma.torch.sparse import names_of_sparse
from bps_rdma.torch.synchronizer import GradientSynchronizer, SynchronizerOptions, option_lines
from bps_rdma.torch.trained import Named, ParametersOf, TrainedParameters
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.units import IndexedParameter

_DEPTH = 2  # objects in objects, in which tensors of an output are looked for
_MOST = 1000  # objects and what they hold, in all
_WITHOUT = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic, ModuleType)  # tensors in them


class ModulePasses:
    """Averages the gradients of a module in each backward pass that follows a forward outside of no_sync().

    Args:
        module: what is trained.
        arguments: of what averages its gradients.
        uneven: which announces the passes.
    """

    def __init__(self, module: torch.nn.Module, arguments: SynchronizerOptions, uneven: UnevenInputs) -> None:
        self._current, self._uneven, self._group = [module], uneven, arguments["group"]
        # What it makes must not refer to this object, whose end removes the hooks of parameters.
        make = _maker(self._current, arguments)
        self.trained = TrainedParameters(self, "ddp", make, self._arrived, self._group, option_lines(arguments))
        self._look_at(module)
        self._looked_at = -1  # the backward that was looked at last, of those that return gradients
        self._end = EndOfBackward(self._end_of_backward, self._failed)
        self._end_without_sync = EndOfBackward(self.trained.end_backward, self.trained.give_up)
        self._running_in: View | None = None  # the view of a backward, whose pass begins with its first gradient
        self._failed_in: View | None = None  # that of the last one, which failed before this rank had sent anything
        self._decided = -1  # the backward in which a hook on outputs has said whether it is one of no_sync()
        self._returned_parameters: set[int] = set()  # ids of those that a forward has returned
        self._undecided: list[torch.nn.Parameter] = []  # of these, whose gradient came before any such hook
        self._end_undecided = EndOfBackward(self._take_undecided, self._drop_undecided)
        self._sync = True  # the forward of the running backward was outside of no_sync(); before it, the last forward
        self._pending = False  # a forward has run, and its gradients have not been synchronised
        self._keeps = False  # gradients of this rank alone, from inside of no_sync()
        self._backward_began = 0  # time.monotonic_ns()
        self._order: list[IndexedParameter] | None = None  # in which the gradients of the first pass became ready
        self._rebuilt = False
        self._delivered: list[tuple[IndexedParameter, torch.Tensor, int]] = []  # within join(): means, their versions

    def _look_at(self, module: torch.nn.Module) -> None:
        self._parameters_now = ParametersOf(module)
        self._returned = ReturnedGradients(module, self._group)

    @property
    def _module(self) -> torch.nn.Module:
        return self._current[0]

    @property
    def synchronizer(self) -> GradientSynchronizer:
        """The object that averages the gradients."""
        return self.trained.synchronizer

    # ---- Forward

    def follow(self, module: torch.nn.Module) -> bool:
        """Trains this module from now on. Returns whether it is another one: the script has replaced it."""
        if module is self._module:
            return False
        self._current[0] = module
        self._returned_parameters.clear()
        self._returned.forget()
        self.trained.forget_values()
        self._look_at(module)
        return True

    def begin_forward(self, sync: bool, takes_all: Callable[[], bool]) -> None:
        """A forward begins.

        Args:
            sync: it is outside of no_sync().
            takes_all: whether it is a collective call, which the others make when the last pass is over.

        Raises:
            BpsError: the last backward failed before its end, when this rank had sent gradients.
        """
        self._sync = sync
        if torch._C._current_graph_task_id() == -1:  # not within a backward that computes activations again
            self._forget_backward()
            if self.trained.is_made:
                self.synchronizer.follow_shapes()
        if not sync:
            self.trained.note_values(self._module.named_parameters)
            return
        self._leave_failed(takes_all)
        self._pending = True

    def _leave_failed(self, takes_all: Callable[[], bool]) -> None:
        """The script goes on after a backward that may have failed. If it has sent nothing, nothing is missing here."""
        if self.trained.is_open and not self.synchronizer.begin_again(keeps_void=True):
            if not self.synchronizer.drop_void():
                raise _unfinished(self.synchronizer.unfinished)
            self._failed_in = view()
        if not self._has_failed:
            return
        if members_of(self._group).size == 1:
            self._failed_in = None
        elif takes_all():  # the others come no further before that pass is over, or have failed, too
            with contextlib.suppress(RefusedError):  # this rank's own, or that of another one
                self.finish()

    def watch(self, outputs: Any) -> None:
        """The forward has given these outputs, from which its backward will come: maybe after other forwards."""
        hook = self._at_start_of_backward if self._sync else self._at_start_without_sync
        for tensor in _tensors_of(outputs):
            if not tensor.is_leaf:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            elif self.trained.is_hooked(tensor):  # a hook would stay there, and run in backwards of other forwards
                self._returned_parameters.add(id(tensor))

    # ---- Backward

    def _at_start_of_backward(self, _: torch.Tensor) -> None:
        if self._end.is_due:
            return
        # A backward that only looks at gradients, as of the inputs, is no pass: other ranks need not do the same.
        if adds_to(self._module.parameters()):
            self._sync = True
            self._begin()
        elif self._pending and self._looked_at != (task := torch._C._current_graph_task_id()):
            self._looked_at = task
            self._returned.note(returned_of(self._module.parameters()))

    def _at_start_without_sync(self, _: torch.Tensor) -> None:
        if not self._end.is_due:  # the gradients of a backward from several forwards are sent if one of these wants it
            self._sync, self._decided = False, torch._C._current_graph_task_id()
            self._take_undecided()

    def _begin(self) -> None:
        if self.trained.is_open:
            self.synchronizer.drop_void()  # the others wait for this one
        self.settle()
        self._backward_began = time.monotonic_ns()
        self._end.ask()
        self._running_in, self._failed_in = view(), None  # the others wait for this pass, if the last one has failed
        self._take_undecided()

    def settle(self) -> None:
        """Settles what a pass works on, before the pass; not in a forward, which a rank may run alone."""
        if self.trained.is_open:
            return
        if self._uneven.is_to_announce:
            self._check_zeroed()
            self._uneven.announce_pass()
        order = None if self._rebuilt else self._order  # in the second pass, buckets are filled in that of the first
        if self.trained.follow(self._parameters_now.now(), self._module.named_parameters, order is not None):
            self._order, self._rebuilt = None, False
        elif order is not None:
            self.trained.rebuild(order)
            self._rebuilt = True

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        is_decided = self._end.is_due or self._decided == torch._C._current_graph_task_id()
        if is_decided or id(parameter) not in self._returned_parameters:
            self._take(parameter)
        else:
            self._undecided.append(parameter)
            self._end_undecided.ask()

    def _take_undecided(self) -> None:
        """Takes gradients of parameters that a forward has returned: its backward may reach them before all others."""
        arrived, self._undecided = self._undecided, []
        for parameter in arrived:
            self._take(parameter)

    def _drop_undecided(self) -> None:
        self._undecided.clear()

    def _take(self, parameter: torch.nn.Parameter) -> None:
        trained, sync = self.trained, self._sync
        entry = trained.entry_of(parameter)
        if entry is not None:
            trained.synchronizer.accumulated(entry, not sync)
        if not sync:
            self._keeps = True
            self._returned.discard(parameter)
            self._end_without_sync.ask()
        else:
            if not self._end.is_due:
                self._begin()
                entry = trained.entry_of(parameter)
            if entry is not None:
                trained.ready(entry)

    def _forget_backward(self) -> None:
        """No backward is running: what a failed one has left does not count."""
        self._end.forget()
        self._end_without_sync.forget()
        self._end_undecided.forget()
        self._drop_undecided()

    def _failed(self) -> None:
        if self._running_in is not None and not self.trained.is_open:
            self._failed_in = self._running_in
        self._running_in = None
        self.trained.give_up()

    @property
    def _has_failed(self) -> bool:
        """Whether the others may wait for a pass whose backward has failed here. The end of its view ends it, too."""
        return self._failed_in is not None and self._failed_in == view()

    def _end_of_backward(self) -> None:
        self._running_in = None
        self._pending = True
        spans().add("backward", self._backward_began)
        self.finish()

    @property
    def is_missed(self) -> bool:
        """Whether a pass is to come although no forward has run: gradients are zeroed, or those of this rank alone."""
        if self._pending or self._has_failed or self.trained.is_open:
            return False
        trained = [each for each in self._parameters_now.now() if each.requires_grad]
        return bool(trained) and (self._keeps or not any(is_used(each.grad) for each in trained))

    def begin_missed(self) -> None:
        """This rank takes part in a pass of the others without a forward."""
        self._sync = self._pending = True

    def finish(self) -> None:
        """Waits until all gradients are means; see DistributedDataParallel.finish_gradient_synchronization()."""
        self._forget_backward()
        if not (self._pending or self._has_failed or self.trained.is_open):
            return
        self._pending = self._keeps = False
        self._returned.forget()
        self.settle()
        if self._has_failed:
            self.synchronizer.begin_failed()
        arrived, before = self.synchronizer.arrived, self.trained.passes
        try:
            self.trained.finish()
        finally:
            if self.trained.is_open or self.trained.passes > before:
                self._order = arrived if self._order is None else self._order
                self._failed_in = None
                self._uneven.end_pass()
            else:  # nothing was sent: the other ranks still wait for this pass
                self._pending = True
        if self._uneven.joined:
            means = self.synchronizer.gradients()
            self._uneven.scale(gradient for _, gradient in means)
            self._delivered = [(entry, gradient, gradient._version) for entry, gradient in means]

    # ---- Uneven inputs

    def shadow(self) -> None:
        """Takes part in a pass of the ranks that have inputs, with none."""
        self._drop_gradients()
        self.begin_missed()
        with contextlib.suppress(RefusedError):  # the other ranks go on
            self.finish()
        self._drop_gradients()

    def end_inputs(self) -> None:
        """This rank has no inputs any more, and the others may still wait for a pass whose backward has failed here.

        Raises:
            BpsError: the last backward failed before its end, when this rank had sent gradients.
        """
        self._forget_backward()
        self._leave_failed(lambda: True)

    def forget_means(self) -> None:
        """join() has ended: gradients may be added to the means."""
        self._delivered = []

    def _drop_gradients(self) -> None:
        self._delivered = []
        for parameter in self._parameters_now.now():
            parameter.grad = None

    def _check_zeroed(self) -> None:
        for entry, gradient, version in self._delivered:
            if entry.parameter.grad is gradient and gradient._version == version:
                raise BpsError(
                    f"in join(), the gradient of {entry.name!r} still is the mean of an earlier pass, which ranks "
                    "without inputs do not have",
                    "call zero_grad() after each step, and run all but the last pass of a step inside no_sync()",
                )

    # ---- Checkpoints

    def make_first(self) -> None:
        """Meets the other ranks for a copy, or in a process that has entered a running job. A collective call."""
        if not self.trained.is_made:
            self.settle()

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what GradientSynchronizer.compression_state() gave. A collective call, before the first pass."""
        if self.synchronizer.load_compression_state(state):
            self._order, self._rebuilt = [entry for unit in self.synchronizer.units for entry in unit.entries], True


def _tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Those of what a forward has given from which a backward comes.

    Objects, as data classes and distributions, are looked into only if there are no others: beside an output, such as
    logits, they may hold tensors of the middle of the graph, as a cache does.
    """
    leaves = tree_leaves(outputs)
    found = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    return found + _in_objects(leaves) if all(each.is_leaf for each in found) else found


def _in_objects(leaves: list[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [(each, _DEPTH) for each in leaves if not isinstance(each, torch.Tensor)]
    for _ in range(_MOST):
        if not left:
            break
        one, depth = left.pop()
        if isinstance(one, torch.Tensor):
            if one.requires_grad:
                found.append(one)
        elif id(one) not in seen and not isinstance(one, _WITHOUT) and not callable(one):
            seen.add(id(one))
            if isinstance(one, Mapping | list | tuple | set | frozenset):
                held = one.values() if isinstance(one, Mapping) else one
                left.extend((each, depth) for each in islice(held, _MOST))
            elif depth > 0:
                left.extend((each, depth - 1) for each in _fields_of(one))
    return found


def _fields_of(one: object) -> list[Any]:
    slots = [
        each for part in type(one).__mro__ for each in vars(part).values() if isinstance(each, MemberDescriptorType)
    ]
    found = list(getattr(one, "__dict__", {}).values())
    for slot in slots:
        with contextlib.suppress(AttributeError):  # it has no value
            found.append(slot.__get__(one))
    return found


def _unfinished(name: str) -> BpsError:
    return BpsError(
        f"the last backward pass was not finished: the gradient of {name!r} is no mean",
        "call finish_gradient_synchronization() on this rank; if that returns, all ranks have means, and step",
    )


def _maker(
    current: list[torch.nn.Module], arguments: SynchronizerOptions
) -> Callable[[Named, str], GradientSynchronizer]:
    def make(named: Named, prefix: str) -> GradientSynchronizer:
        pairs = list(named)
        known: SynchronizerOptions = {**arguments, "sparse": names_of_sparse(current[0], pairs)}
        return GradientSynchronizer(pairs, prefix, **known)

    return make

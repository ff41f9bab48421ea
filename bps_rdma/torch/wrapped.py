# SPDX-License-Identifier: Apache-2.0
"""The base of the optimizers that average gradients: which parameters they train, under which names, and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bps_rdma.torch.backward import EndOfBackward
from bps_rdma.torch.synchronizer import GradientSynchronizer, SynchronizerOptions, option_lines
from bps_rdma.torch.trained import Named, TrainedParameters
from bps_rdma.torch.wrapping import new_instance

_KEPT = ("_bps_arguments", "_bps_passes")  # by a copy


class WrappedOptimizer(torch.optim.Optimizer):
    """The base of DistributedOptimizer and CrossBarrier; see rebase().

    A copy, as by copy.deepcopy() or torch.save(), trains the parameters that were copied with it, under names of its
    own: all ranks that use copies take the first steps with them in the same order.
    """

    _bps_kind = ""
    _bps_names: dict[torch.nn.Parameter, str]
    _bps_arguments: SynchronizerOptions
    _bps_passes: int  # backward passes per step
    _bps_left: dict[torch.nn.Parameter, int]  # how many of them are still to come, where some have been
    _bps_trained: TrainedParameters
    _bps_end: EndOfBackward

    def _bps_begin(self, named: Named, passes: int, arguments: SynchronizerOptions) -> None:
        self._bps_names = {parameter: name for name, parameter in named}
        self._bps_passes = passes
        self._bps_arguments = {**arguments, "accumulates": passes > 1}
        self._bps_set_up()
        with self._bps_trained.making():
            self._bps_trained.begin(self._bps_named())

    def _bps_set_up(self) -> None:
        group, make = self._bps_arguments["group"], _maker(self._bps_arguments)
        options = option_lines(self._bps_arguments)
        self._bps_trained = TrainedParameters(
            self, self._bps_kind, make, self._bps_arrived, group, options, self._bps_computed
        )
        self._bps_end = EndOfBackward(self._bps_backward_ended, self._bps_backward_failed)
        self._bps_begin_step()

    def _bps_arrived(self, parameter: torch.nn.Parameter) -> None:
        raise NotImplementedError

    _bps_computed: Callable[[torch.nn.Parameter], None] | None = None  # a method, where a class needs it

    def _bps_begin_step(self) -> None:
        """No backward counts yet."""
        self._bps_left = {}

    def _bps_backward_ended(self) -> None:
        """Called where `_bps_end` was asked."""
        self._bps_trained.end_backward()

    def _bps_backward_failed(self) -> None:
        """Called instead."""
        self._bps_trained.give_up()
        if not self._bps_trained.is_open:  # nothing was sent: the others wait for the step that begins next
            self._bps_begin_step()

    def _bps_parameters(self) -> list[torch.nn.Parameter]:
        return [each for options in self.param_groups for each in options["params"]]

    def _bps_named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters in the order of the given names; those that were added later are named by their place."""
        parameters = self._bps_parameters()
        there = set(parameters)
        yield from ((name, each) for each, name in self._bps_names.items() if each in there)
        for number, each in enumerate(parameters):
            if each not in self._bps_names:
                yield f"parameter {number}", each

    def _bps_settle(self) -> None:
        """Begins a pass: follows the parameters that are trained now."""
        if not self._bps_trained.is_open:
            self._bps_trained.follow(self._bps_parameters(), self._bps_named)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. All ranks add the same ones, with the same values, before the same step."""
        super().add_param_group(param_group)
        if hasattr(self, "_bps_trained"):
            self._bps_trained.watch(self._bps_parameters())

    # ---- Checkpoints and copies

    def compression_state_dict(self) -> dict[str, Any]:
        """Returns the feedback that compression keeps on this rank. Each rank saves its own, beside state_dict().

        A collective call between steps: every rank must make it, which is why it is not a part of state_dict(). See
        bps_rdma.feedback_state().
        """
        self._bps_settle()
        return self._bps_trained.synchronizer.compression_state()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what compression_state_dict() gave on this rank. A collective call, before the first step.

        Raises:
            InvalidArgumentError: it is the state of other parameters, or lacks what this compression remembers.
        """
        self._bps_settle()
        self._bps_trained.synchronizer.load_compression_state(state)

    def __reduce_ex__(self, _: Any) -> Any:
        """A copy is of a class that is made in the same way."""
        return new_instance, type(self)._bps_made_of, self.__getstate__()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the usual state, and what this wrapper was made with."""
        state: dict[str, Any] = super().__getstate__()
        state.update({name: self.__dict__[name] for name in _KEPT})
        state["_bps_names"] = [(name, each) for each, name in self._bps_names.items()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by load_state_dict(), with a state that has nothing of this wrapper."""
        named = state.pop("_bps_names", None)
        super().__setstate__(state)
        if named is not None:
            self._bps_names = {parameter: name for name, parameter in named}
            self._bps_set_up()
            self._bps_trained.watch(self._bps_parameters())


def _maker(arguments: SynchronizerOptions) -> Callable[[Named, str], GradientSynchronizer]:
    return lambda named, prefix: GradientSynchronizer(named, prefix, **arguments)

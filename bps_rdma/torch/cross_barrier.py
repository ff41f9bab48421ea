# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier: the next forward begins while gradients of the last step are still being synchronised.

step() only records the updates to make. Before a module computes, the optimizer steps on that module's own parameters,
one by one as their means arrive, the first layers first. The idea is ByteScheduler's (Peng et al., SOSP 2019).

The module also has the names that BytePS's scripts use from byteps.torch.cross_barrier: init, rank, ...
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bps_rdma import job, local_rank, local_size, poll, rank, shutdown, size, synchronize
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.torch import start
from bps_rdma.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from bps_rdma.torch.checks import check_count, check_module, check_optimizer
from bps_rdma.torch.compression import AnyCompression, Compression, compressor_of
from bps_rdma.torch.names import unique
from bps_rdma.torch.ops import push_pull, push_pull_async_inplace
from bps_rdma.torch.optimizer import DistributedOptimizer, names_of
from bps_rdma.torch.rebase import rebase, remove_hooks
from bps_rdma.torch.start import AnyGroup, init, resume, suspend
from bps_rdma.torch.synchronizer import GradientSynchronizer
from bps_rdma.torch.units import Place

__all__ = [
    "Compression",
    "CrossBarrier",
    "DistributedOptimizer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
    "synchronize",
]

byteps_push_pull = push_pull_async_inplace  # BytePS's alias


def CrossBarrier(  # noqa: N802
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: AnyCompression = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
    group: AnyGroup = None,
    exact: bool | None = None,
) -> Any:
    """The optimizer, with updates that are made during the next forward, just before a module needs them.

    The weights are those that DistributedOptimizer gives. Between step() and the next forward, parameters are not
    up to date yet: call synchronize() before reading them, saving them or using them outside of their modules.
    Gradients cannot be read or clipped. In a job that goes on without lost workers (BPS_MIN_WORKERS) step() waits for
    all means and makes all updates, as DistributedOptimizer does: either all ranks use a step or none does.

    Args:
        model: uses each parameter in the forward of the module that owns it; on the CPU or on CUDA devices.
        optimizer: one that treats each parameter by itself, such as SGD, Adam, AdamW or RMSprop; not LBFGS.
        named_parameters: as for DistributedOptimizer.
        compression: how gradients are sent; as for DistributedOptimizer.
        backward_passes_per_step: backward passes whose gradients are added up before they are sent.
        num_steps: step number num_steps waits, so that the weights are right after a training of known length.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        exact: True: means are exact, and rounded once: the same bits for any number of ranks (see docs/exact.md).
            Default: what BPS_EXACT says.

    Raises:
        InvalidArgumentError: an argument cannot be used, or the optimizer needs all parameters at once.
    """
    check_module(model)
    check_optimizer(optimizer)
    check_count("backward_passes_per_step", backward_passes_per_step, 1)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("LBFGS cannot step on single parameters", "use DistributedOptimizer")
    start.init()
    named = names_of(optimizer, list(model.named_parameters()) if named_parameters is None else named_parameters)
    how = compressor_of(compression, exact)
    synchronizer = GradientSynchronizer(
        named,
        unique("CrossBarrier"),
        "overlap",
        compression=how,
        group=start.group_of(group),
        accumulates=backward_passes_per_step > 1,
    )
    result = rebase(optimizer, _CrossBarrier)
    result._begin(model, synchronizer, backward_passes_per_step, num_steps)
    return result


class _CrossBarrier(torch.optim.Optimizer):
    """See CrossBarrier()."""

    def _begin(self, model: torch.nn.Module, synchronizer: GradientSynchronizer, passes: int, num_steps: int) -> None:
        self._bps_synchronizer = synchronizer
        self._bps_passes = passes
        self._bps_left = dict.fromkeys(synchronizer.places, passes)
        self._bps_steps_left = num_steps
        self._bps_place_of = {id(place.parameter): place for place in synchronizer.places}
        self._bps_due: dict[Place, dict[str, Any]] = {}  # updates to make, with the options of their step
        me = weakref.ref(self)
        hooks = [
            place.parameter.register_post_accumulate_grad_hook(_gradient_hook(me, place))  # type: ignore[no-untyped-call]
            for place in synchronizer.places
        ]
        for module in model.modules():
            own = [self._bps_place_of.get(id(p)) for p in module.parameters(recurse=False)]
            places = [place for place in own if place is not None]
            if places:
                hooks.append(module.register_forward_pre_hook(_forward_hook(me, places)))
        weakref.finalize(self, remove_hooks, hooks)
        weakref.finalize(self, remove_hooks, synchronizer.hooks)

    def _arrived(self, place: Place) -> None:
        if place in self._bps_due:
            raise BpsError(
                f"{place.name!r} was used in a forward before its last update, outside of the module that owns it",
                "call synchronize() after step(), or use DistributedOptimizer",
            )
        self._bps_left[place] -= 1
        self._bps_synchronizer.accumulated(place, self._bps_left[place] > 0)
        if self._bps_left[place] == 0:
            self._bps_synchronizer.ready(place)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Records updates of the parameters with the options that are set now; returns the closure's loss."""
        loss = closure() if closure is not None else None
        if job.current().may_lose_members:
            return self._step_at_once(loss)
        self.synchronize()  # updates of parameters that the model did not use since the last step
        self._bps_synchronizer.finish_later()
        for options in self.param_groups:
            kept = {name: value for name, value in options.items() if name != "params"}
            for parameter in options["params"]:
                place = self._bps_place_of.get(id(parameter))
                if place is not None:
                    self._bps_due[place] = kept
        self._bps_left = dict.fromkeys(self._bps_left, self._bps_passes)
        self._bps_steps_left -= 1
        if self._bps_steps_left == 0:
            self.synchronize()
        return loss

    def _step_at_once(self, loss: Any) -> Any:
        """All ranks use a step or none does: nothing may be updated before all means are on all ranks."""
        self._bps_left = dict.fromkeys(self._bps_left, self._bps_passes)
        self._bps_synchronizer.begin()
        self._bps_synchronizer.finish()
        super().step()
        return loss

    def synchronize(self) -> None:
        """Makes all updates that have been recorded.

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradients in time; names it.
        """
        self._update(list(self._bps_due))

    def _update(self, places: list[Place]) -> None:
        for place in places:
            options = self._bps_due.pop(place, None)
            if options is None:
                continue
            gradient = self._bps_synchronizer.take_mean(place)
            if gradient is not None:
                self._step_on(place.parameter, gradient, options)

    def _step_on(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        groups, later = self.param_groups, parameter.grad
        self.param_groups, parameter.grad = [{"params": [parameter], **options}], gradient
        try:
            super().step()
        finally:
            self.param_groups, parameter.grad = groups, later

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; those of recorded updates are kept until the updates are made."""
        if self._bps_synchronizer.open and self._bps_synchronizer.begin_again():  # the end of a view interrupted it
            self._bps_left = dict.fromkeys(self._bps_left, self._bps_passes)
        super().zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """As usual, after all recorded updates."""
        self.synchronize()
        return super().state_dict()


def _gradient_hook(optimizer: weakref.ref[_CrossBarrier], place: Place) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        alive = optimizer()
        if alive is not None:
            alive._arrived(place)

    return arrived


def _forward_hook(optimizer: weakref.ref[_CrossBarrier], places: list[Place]) -> Any:
    def before_forward(*_: Any) -> None:
        alive = optimizer()
        if alive is not None:
            alive._update(places)

    return before_forward

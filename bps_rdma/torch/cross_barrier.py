# SPDX-License-Identifier: Apache-2.0
"""CrossBarrier: the next forward begins while gradients of the last step are still being synchronised.

step() only records the updates to make. Before a module computes, the optimizer steps on that module's own parameters,
one by one as their means arrive, the first layers first. The idea is ByteScheduler's (Peng et al., SOSP 2019).

The module also has the names that BytePS's scripts use from byteps.torch.cross_barrier: init, rank, ...
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bps_rdma import job, local_rank, local_size, poll, rank, shutdown, size, synchronize
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.kept_errors import keeping
from bps_rdma.operations.options import AnyCompression, text_of
from bps_rdma.torch import membership
from bps_rdma.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from bps_rdma.torch.checks import check_count, check_layers, check_module, check_not_averaged, check_optimizer
from bps_rdma.torch.compression import Compression
from bps_rdma.torch.holders import is_of_the_script, is_shared
from bps_rdma.torch.membership import AnyGroup, init, resume, suspend
from bps_rdma.torch.modes import as_in_step
from bps_rdma.torch.ops import push_pull, push_pull_async_inplace
from bps_rdma.torch.optimizer import DistributedOptimizer, SynchronousOptimizer
from bps_rdma.torch.parameters import names_of
from bps_rdma.torch.pending_gradient import PendingGradient, error_of
from bps_rdma.torch.synchronizer import SynchronizerOptions
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.units import IndexedParameter
from bps_rdma.torch.wrapped import WrappedOptimizer
from bps_rdma.torch.wrapping import rebase
from bps_rdma.unfinished import Unfinished

__all__ = [
    "Compression", "CrossBarrier", "DistributedOptimizer", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "byteps_push_pull", "init", "local_rank", "local_size", "poll", "push_pull", "rank",
    "resume", "shutdown", "size", "suspend", "synchronize",
]  # fmt: skip

byteps_push_pull = push_pull_async_inplace  # BytePS's alias


def CrossBarrier(  # noqa: N802
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: AnyCompression | None = None,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
    group: AnyGroup = None,
    exact: bool | None = None,
    find_unused_parameters: bool = False,
) -> SynchronousOptimizer | LateOptimizer:
    """The optimizer, with updates that are made during the next forward, just before a module needs them.

    The weights are those that DistributedOptimizer gives. Between step() and the next forward, parameters are not
    up to date yet: call synchronize() before reading them, copying them or using them outside of their modules. The
    state_dict() and load_state_dict() of modules and of the optimizer make the updates first.
    Gradients cannot be read or clipped: from backward() to zero_grad(), .grad is a tensor that raises an error when it
    is used. In a job that goes on without lost workers (BPS_MIN_WORKERS) the result is what DistributedOptimizer gives:
    either all ranks use a step or none does.

    Args:
        model: uses each parameter in the forward of the module that owns it; on the CPU or on CUDA devices. Not to be
            trained through torch.compile, nor evaluated through it between step() and synchronize().
        optimizer: one that treats each parameter by itself, such as SGD, Adam, AdamW or RMSprop; not LBFGS.
        named_parameters: as for DistributedOptimizer.
        compression: how gradients are sent; as for DistributedOptimizer.
        backward_passes_per_step: backward passes whose gradients are added up before they are sent.
        num_steps: step number num_steps waits, so that the weights are right after a training of known length.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        exact: True: means are exact, and rounded once: the same bits for any number of ranks (see docs/exact.md).
            Default: what BPS_EXACT says.
        find_unused_parameters: as for DistributedDataParallel with strategy="overlap": True: ranks may leave parameters
            unused, which costs a small operation per step. Otherwise step() raises an error that names them.

    Returns:
        An instance of the optimizer's class, too. In a job that goes on without lost workers it is what
        DistributedOptimizer makes.

    Raises:
        InvalidArgumentError: an argument cannot be used, or the optimizer needs all parameters at once. Or torch's
            DistributedDataParallel averages gradients of the model already.
    """
    check_module(model)
    check_optimizer(optimizer)
    check_count("backward_passes_per_step", backward_passes_per_step, 1)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("LBFGS cannot step on single parameters", "use DistributedOptimizer")
    membership.init()
    named = names_of(optimizer, list(model.named_parameters()) if named_parameters is None else named_parameters)
    ours = membership.group_of(group)
    check_layers(model, members_of(ours).size)
    check_not_averaged(named)
    arguments: SynchronizerOptions = {
        "strategy": "overlap", "compression": text_of(compression, exact), "group": ours,
        "find_unused": find_unused_parameters,
        "in_order": False,  # what the next forward needs first overtakes the rest
    }  # fmt: skip
    if job.current().may_lose_members:
        at_once = rebase(optimizer, SynchronousOptimizer)
        at_once._bps_begin(named, backward_passes_per_step, arguments)
        return at_once
    result = rebase(optimizer, LateOptimizer)
    result._bps_model = model
    result._bps_steps_left = num_steps
    result._bps_begin(named, backward_passes_per_step, arguments)
    return result


class LateOptimizer(WrappedOptimizer):
    """See CrossBarrier()."""

    _bps_kind = "CrossBarrier"
    _bps_takes_means = True  # its steps use those of the last pass, also while another one is open
    _bps_model: torch.nn.Module
    _bps_steps_left: int
    # Updates to make, with the options of their step, and the version of what they change; None: others share that.
    _bps_due: dict[torch.nn.Parameter, tuple[dict[str, Any], int | None]]
    _bps_pending: dict[torch.nn.Parameter, PendingGradient]  # the stand-in in .grad of those that were sent
    _bps_sent: set[torch.nn.Parameter]  # in this pass
    _bps_hooked: weakref.WeakSet[torch.nn.Module]
    _bps_default_device: torch.device  # in the last step()
    _bps_lock: threading.RLock  # who updates: another thread may save a checkpoint
    _bps_is_updating: bool  # under the lock: the last update is no longer due, and not made yet

    def _bps_set_up(self) -> None:
        super()._bps_set_up()
        self._bps_due, self._bps_pending, self._bps_sent = {}, {}, set()
        self._bps_default_device = torch.get_default_device()
        self._bps_lock, self._bps_is_updating = threading.RLock(), False
        self._bps_hooked = weakref.WeakSet()
        self._bps_hook_modules()

    def _bps_hook_modules(self) -> None:
        for module in self._bps_model.modules():
            if module._parameters and module not in self._bps_hooked:
                self._bps_hooked.add(module)
                update = _Update(self)
                for hook in (
                    # Before other hooks: those of weight_norm() compute a weight from parameters.
                    module.register_forward_pre_hook(update, prepend=True),
                    module.register_state_dict_pre_hook(update),  # type: ignore[no-untyped-call]
                    module._register_load_state_dict_pre_hook(update, with_module=True),  # type: ignore[no-untyped-call]
                ):
                    weakref.finalize(self, hook.remove)

    def _bps_arrived(self, parameter: torch.nn.Parameter) -> None:
        trained = self._bps_trained
        entry = trained.entry_of(parameter)
        if parameter in self._bps_due:
            name = trained.name_of(parameter)
            raise BpsError(
                f"{name!r} was used in a forward before its last update, outside of the module that owns it",
                "call synchronize() after step(), or use DistributedOptimizer",
            )
        self._bps_end.ask()
        left = self._bps_left[parameter] = self._bps_left.get(parameter, self._bps_passes) - 1
        if entry is not None:
            trained.synchronizer.accumulated(entry, left > 0)
        if left == 0:
            if not trained.is_open:
                self._bps_settle()
                entry = trained.entry_of(parameter)
            if entry is not None:
                trained.ready(entry)
                self._bps_hide(entry)

    def _bps_computed(self, parameter: torch.nn.Parameter) -> None:
        """Prepares .grad for autograd, which is about to add to it."""
        if type(parameter.grad) is PendingGradient:
            name = self._bps_trained.name_of(parameter)
            if self._bps_left.get(parameter) != 0:
                raise error_of(name)
            raise BpsError(
                f"{name!r} got a gradient again before step(), after {self._bps_passes} backward passes",
                "set backward_passes_per_step to the number of backward passes between steps",
            )
        if not self._bps_left.get(parameter) and is_of_the_script(parameter):
            raise BpsError(
                f"the gradient of {self._bps_trained.name_of(parameter)!r} lies in memory that the script holds, where "
                "CrossBarrier averages it after step()",
                "call zero_grad(set_to_none=True), and hold no gradients; or use DistributedOptimizer",
            )

    def _bps_hide(self, entry: IndexedParameter) -> None:
        """Hides a gradient that is being averaged in place: nobody may use it until the next forward uses its mean."""
        parameter = entry.parameter
        pending = self._bps_pending.get(parameter)
        if pending is None or pending._bps_like != (parameter.dtype, parameter.device, parameter.shape):
            pending = self._bps_pending[parameter] = PendingGradient.of(parameter, entry.name)
        parameter.grad = pending
        self._bps_sent.add(parameter)

    def _bps_named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self.synchronize()  # the means of the last pass, before what averages them is made anew
        self._bps_hook_modules()
        return super()._bps_named()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Records updates of the parameters with the options that are set now; returns the closure's loss.

        Raises:
            BpsError: a gradient was changed after backward(), or is missing; names its parameter. Or the optimizer has
                hooks.
        """
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            raise BpsError(
                "the optimizer has hooks of step(), which CrossBarrier would call for each parameter",
                "remove them, or use DistributedOptimizer",
            )
        loss = closure() if closure is not None else None
        with self._bps_lock:
            self._bps_record()
        return loss

    def _bps_record(self) -> None:
        self._bps_end.forget()
        self.synchronize()  # updates of parameters that the model did not use since the last step
        self._bps_settle()
        synchronizer = self._bps_trained.synchronizer
        changed = [each for each in self._bps_sent if each.grad is not self._bps_pending[each]]
        unused = synchronizer.finish_later()
        self._bps_begin_step()
        self._bps_sent.clear()
        self._bps_default_device = torch.get_default_device()
        for options in self.param_groups:
            # Schedulers write to a learning rate that is a tensor.
            kept = {name: tree_map(_copy, value) for name, value in options.items() if name != "params"}
            for parameter in options["params"]:
                if self._bps_trained.entry_of(parameter) is not None:
                    self._bps_due[parameter] = kept, None if is_shared(parameter) else parameter._version
        job.current().part(Unfinished).add(self)
        self._bps_steps_left -= 1
        if changed:
            raise error_of(self._bps_trained.name_of(changed[0]))
        # Where backward has failed, the next forward raises the error, as on the other ranks: all lose the same batch.
        if unused is not None and synchronizer.failure is None:
            raise unused
        if self._bps_steps_left == 0:
            self.synchronize()

    step.hooked = True  # type: ignore[attr-defined]  # for torch: the step() that it calls runs the hooks of users

    def synchronize(self) -> None:
        """Makes all updates that have been recorded.

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradients in time; names it.
            RefusedError: backward() has failed on this rank, or on another one, before all gradients were sent. All
                ranks have made those updates then whose gradients had been sent.
        """
        with self._bps_lock:
            self._bps_update(list(self._bps_due))

    def _bps_update(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        with self._bps_lock, as_in_step(self._bps_default_device):
            self._bps_is_updating = True
            try:
                for parameter in parameters:
                    if parameter is not None:
                        self._bps_update_one(parameter)
            except BpsError:
                self._bps_update_rest()
                raise
            finally:
                self._bps_is_updating = False

    def _bps_update_rest(self) -> None:
        """A step has failed: makes what other updates can be made, or each forward would raise the error of one."""
        for parameter in list(self._bps_due):
            with contextlib.suppress(BpsError), keeping:
                self._bps_update_one(parameter, explains=False)  # other ranks have nothing more to explain

    def _bps_update_one(self, parameter: torch.nn.Parameter, *, explains: bool = True) -> None:
        due = self._bps_due.get(parameter)
        if due is None:
            return
        options, version = due
        try:
            gradient = self._bps_trained.take_mean(parameter, explains=explains)
        except BpsError:  # it will never come; after what a signal handler raises it may
            del self._bps_due[parameter]
            raise
        del self._bps_due[parameter]
        if gradient is None:
            return
        if version not in (None, parameter._version):
            raise BpsError(
                f"{self._bps_trained.name_of(parameter)!r} was changed after step(), before its update",
                "call synchronize() after step(), and change weights then",
            )
        self._step_on(parameter, gradient, options)

    def _step_on(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        groups, later, alone = self.param_groups, parameter.grad, {"params": [parameter], **options}
        self.param_groups, parameter.grad = [alone], gradient
        try:
            super().step()
        finally:
            self.param_groups, parameter.grad = groups, later
        for name, value in options.items():
            if alone.get(name) is not value and alone.get(name) != value:
                raise BpsError(
                    f"the optimizer changes its option {name!r} in step(), which CrossBarrier calls for each parameter",
                    "use DistributedOptimizer",
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; those of recorded updates are kept until the updates are made.

        Raises:
            BpsError: between backward() and step(), when gradients are on their way already.
        """
        trained = self._bps_trained
        self._bps_end.forget()
        if trained.is_open and not trained.synchronizer.begin_again():
            raise BpsError(
                "zero_grad() was called between backward() and step(), while gradients are being averaged",
                "call step() first, or use DistributedOptimizer",
            )
        self._bps_begin_step()
        self._bps_sent.clear()  # of a pass that has failed
        with self._bps_lock:
            super().zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as usual, after all recorded updates."""
        with self._bps_lock:
            self.synchronize()
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as usual, after all recorded updates."""
        with self._bps_lock:
            self.synchronize()
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the usual state after all recorded updates, with the model: the copy updates the copied model."""
        with self._bps_lock:
            self.synchronize()
            return {**super().__getstate__(), "_bps_model": self._bps_model, "_bps_steps_left": self._bps_steps_left}


class _Update:
    """A hook of a module: before it computes, saves or loads, its own parameters are updated. Copies do not have it."""

    def __init__(self, optimizer: LateOptimizer | None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None and (optimizer._bps_due or optimizer._bps_is_updating):
            optimizer._bps_update(module._parameters.values())

    def __reduce__(self) -> Any:
        return _Update, (None,)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value

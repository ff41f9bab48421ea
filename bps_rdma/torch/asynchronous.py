# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with BPS_ASYNC=1: servers keep the weights, and ranks add their changes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from bps_rdma import Group, Handle, job
from bps_rdma.errors import BpsError, InvalidArgumentError, MismatchError
from bps_rdma.kept_errors import keeping
from bps_rdma.operations import OperationOptions, ReduceOp, accumulate_async, start, store, unstore
from bps_rdma.operations.options import NONE
from bps_rdma.presence import raised
from bps_rdma.torch import membership
from bps_rdma.torch.check_alike import check_alike
from bps_rdma.torch.membership import View, naming
from bps_rdma.torch.parameters import FixedParameters
from bps_rdma.torch.transfer import staged_from, zeros_beside
from bps_rdma.torch.wrapping import forgetting_scale, new_instance, scaled_step


class _Weights:
    """All parameters of one dtype, flat, as the servers kept them when this rank last looked.

    They are where the parameters are if the core takes them there, and otherwise on the CPU.
    """

    def __init__(self, name: str, parameters: list[torch.nn.Parameter]) -> None:
        self.name = name
        self.sent = False  # a change is not over: perhaps the servers have it
        self._parameters = parameters
        self._versions: list[int] = []
        count = sum(p.numel() for p in parameters)
        beside: torch.Tensor = parameters[0]
        if staged_from(beside) is not None or any(p.device != beside.device for p in parameters):
            beside = torch.empty(0, dtype=beside.dtype, device="cpu")
        self.known, self.delta = (zeros_beside(beside, count, beside.dtype) for _ in range(2))

    def read(self, into: torch.Tensor) -> None:
        """Copies the parameters, and remembers that nobody has changed them since."""
        for parameter, part in zip(self._parameters, self._parts(into), strict=True):
            part.copy_(parameter.detach().reshape(-1))
        self._versions = [parameter._version for parameter in self._parameters]

    def write(self) -> None:
        """Makes the parameters what is known of them."""
        for parameter, part in zip(self._parameters, self._parts(self.known), strict=True):
            parameter.detach().copy_(part.view_as(parameter))
        self._versions = [parameter._version for parameter in self._parameters]

    def was_changed(self, known: bool) -> bool:
        """Returns whether somebody has written to the parameters; with `known`, values that are not the known ones."""
        return any(
            parameter._version != version
            and not (known and torch.equal(parameter.detach().reshape(-1), part.to(parameter.device)))
            for parameter, version, part in zip(self._parameters, self._versions, self._parts(self.known), strict=True)
        )

    def _parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        begin = 0
        for parameter in self._parameters:
            yield flat[begin : begin + parameter.numel()]
            begin += parameter.numel()


class AsynchronousOptimizer(torch.optim.Optimizer):
    """The optimizer that DistributedOptimizer() returns with BPS_ASYNC=1; see docs/async.md."""

    _step_supports_amp_scaling = True  # torch's GradScaler calls step() also where it has found an infinity
    _bps_is_copy = False  # the other ranks know nothing of this copy yet
    _bps_weights: list[_Weights]
    _bps_handles: list[Handle[Any]]  # operations that are under way
    _bps_unfinished: bool  # a change has failed: its deltas stay until the servers have all of it
    _bps_view: View | None  # in which the weights were stored
    _bps_steps: int  # steps that all ranks have completed, with BPS_STALENESS=0

    def __reduce_ex__(self, _: Any) -> Any:
        """A copy is of a class that is made in the same way."""
        return new_instance, type(self)._bps_made_of, self.__getstate__()  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the usual state. A copy's weights get names of their own at the first step, which all ranks make."""
        return {**super().__getstate__(), "_bps_copied": (self._bps_fixed, self._bps_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also called by load_state_dict(), with a state that has nothing of this wrapper."""
        copied = state.pop("_bps_copied", None)
        super().__setstate__(state)
        if copied is not None:
            self._bps_fixed, self._bps_group = copied
            self._bps_is_copy = True

    def _bps_begin_copy(self) -> None:
        if self._bps_is_copy:
            self._begin(self._bps_fixed, self._bps_group)

    def compression_state_dict(self) -> dict[str, Any]:
        """Returns nothing to save: changes of weights travel as they are."""
        return {}

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what compression_state_dict() gave.

        Raises:
            InvalidArgumentError: it is the state of something else.
        """
        if state:
            raise InvalidArgumentError("changes of weights travel as they are, and compression remembers nothing",
                                       "load it without BPS_ASYNC, where it was saved")  # fmt: skip

    def _begin(self, fixed: FixedParameters, group: Group | None) -> None:
        self._bps_fixed = fixed
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for _, parameter in fixed.named:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._bps_group = group
        self._bps_handles = []
        was_copy, self._bps_is_copy = self._bps_is_copy, False
        try:
            with naming("Weights", group) as self._bps_prefix:
                self._bps_weights = [
                    _Weights(f"{self._bps_prefix}.{str(dtype).removeprefix('torch.')}", parameters)
                    for dtype, parameters in by_dtype.items()
                ]
                self._bps_view = None
                if not job.current().has_entrants:  # else some may be beyond this: the next step() stores them
                    # With 0 ranks meet in each step, and with another number they never do.
                    staleness = "0" if job.current().staleness == 0 else "another number"
                    check_alike([f"BPS_STALENESS={staleness}"], f"{self._bps_prefix}.settings", group)
                    self.store_weights()
        except BaseException:
            self._bps_is_copy = was_copy  # it begins again, and may get another name
            raise

    def store_weights(self) -> None:
        """The parameters of the group's first rank become those of all ranks, and those that the servers keep.

        A collective call: every rank of the group must make it. Call it after the parameters have been replaced, as by
        load_state_dict(). A change of this rank that the servers have not got, because step() has failed, is lost.
        """
        if self._bps_is_copy:
            self._bps_begin_copy()
            if self._bps_view is not None:
                return
        self._bps_settle()
        running, entered = job.current(), membership.view()
        root = (self._bps_group or running.world).ranks[0]
        for weights in self._bps_weights:
            weights.read(weights.known)
            if running.staleness == 0:  # changes of one step meet, as always: nothing has to be kept
                start.broadcast(weights.known, root, self._bps_options(weights.name)).wait()
            else:
                store(weights.known, weights.name, root=root, group=self._bps_group)
            weights.write()
        self._bps_view = entered
        self._bps_unfinished = False
        self._bps_steps = 0

    def unstore_weights(self) -> None:
        """The parameters of all ranks become what the servers keep, which they keep no more: the end of training.

        A collective call: every rank of the group must make it. With BPS_STALENESS=0 servers keep nothing, and it does
        nothing. store_weights() begins again.
        """
        self._bps_begin_copy()
        self._bps_settle()
        if job.current().staleness == 0:
            return
        if membership.view() != self._bps_view:  # the next step() would have stored them
            self.store_weights()
        for weights in self._bps_weights:
            unstore(weights.known, weights.name, group=self._bps_group)
            weights.write()

    def _bps_options(self, name: str) -> OperationOptions:
        return OperationOptions(ReduceOp.sum, name, 0, self._bps_group, None, True, NONE)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Steps with this rank's gradients, adds the change to the servers' weights, and takes these over.

        If it fails, the change is not lost: the next step first completes it, and then steps. Nothing is added twice.

        Raises:
            DeadlineError: the slowest rank is more than BPS_STALENESS steps behind, and has not caught up.
            PeerLostError: a server is lost, and with it the weights.
            RoundAbortedError: the job goes on with other ranks. This rank's weights are as its optimizer has left
                them; the next step first makes those of the lowest rank everyone's.
            InvalidArgumentError: the parameters are not what the last step has left: call store_weights() on all ranks;
                or others are trained than at the beginning.
            MismatchError: with BPS_STALENESS=0, a step has failed on this rank and not on others, or the other way
                round: call store_weights() on all ranks.
        """
        with forgetting_scale(self):
            return self._bps_step(closure, **options)

    step.hooked = True  # type: ignore[attr-defined]  # for torch: the step() that it calls runs the hooks of users

    def _bps_step(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        self._bps_begin_copy()
        running = job.current()
        self._bps_fixed.check(self)
        if membership.view() != self._bps_view:
            self.store_weights()
        self._bps_settle()
        if any(weights.was_changed(known=not self._bps_unfinished) for weights in self._bps_weights):
            raise InvalidArgumentError(
                "parameters were changed since the last step: every rank would add that change to the weights",
                "call store_weights() of the optimizer on all ranks after load_state_dict() or any other change",
            )
        if self._bps_unfinished and running.staleness != 0:
            self._bps_add(running.staleness)
        inner = super().step
        parameters = (each for group in self.param_groups for each in group["params"])
        result = scaled_step(self, lambda: inner(closure, **options), parameters)
        for weights in self._bps_weights:
            weights.read(weights.delta)
            weights.delta.sub_(weights.known)
            weights.sent = False
        self._bps_unfinished = True
        self._bps_meet() if running.staleness == 0 else self._bps_add(running.staleness)
        return result

    def _bps_add(self, staleness: int | None) -> None:
        """Adds the deltas where that has not been done, and takes over what the servers keep."""
        with self._bps_all_awaited():
            for weights in self._bps_weights:
                again, weights.sent = weights.sent, True
                try:
                    handle = accumulate_async(
                        weights.delta,
                        weights.name,
                        out=weights.known,
                        staleness=staleness,
                        group=self._bps_group,
                        again=again,
                    )
                except BpsError:
                    weights.sent = again
                    raise
                self._bps_handles.append(handle)
        self._bps_finish()

    def _bps_meet(self) -> None:
        """Adds the deltas of all ranks: each of them has come as far, or nothing is changed."""
        steps = np.full(1, self._bps_steps, np.int64)
        with self._bps_all_awaited():
            for weights in self._bps_weights:
                # This works in place: after a failure it is computed anew, from parameters that have the change still.
                self._bps_handles.append(start.reduce(weights.delta, weights.delta, self._bps_options(weights.name)))
            self._bps_handles.append(start.reduce(steps, steps, self._bps_options(f"{self._bps_prefix}.steps")))
        size = (self._bps_group or job.current().world).size
        if int(steps[0]) != size * self._bps_steps:
            raise MismatchError(
                "ranks have not completed the same steps, because one of them failed on some ranks only",
                "call store_weights() of the optimizer on all ranks",
            )
        for weights in self._bps_weights:
            weights.known.add_(weights.delta)
        self._bps_steps += 1
        self._bps_finish()

    def _bps_finish(self) -> None:
        self._bps_unfinished = False
        for weights in self._bps_weights:
            weights.write()

    @contextlib.contextmanager
    def _bps_all_awaited(self) -> Iterator[None]:
        """Waits until nothing is under way, even after a failure: the buffers are this rank's again."""
        failure: BpsError | None = None
        try:
            yield
        except BpsError as error:
            failure = error
        failure = self._bps_settle(failure)
        if failure is not None:
            raise raised(failure)

    def _bps_settle(self, failure: BpsError | None = None) -> BpsError | None:
        """Waits for what is under way, which an interrupted call may have left; the first failure, after `failure`."""
        while self._bps_handles:
            try:
                with keeping:  # not every caller raises it
                    self._bps_handles[0].wait()
            except BpsError as error:
                failure = failure or error
            self._bps_handles.pop(0)  # not when it was interrupted
        return failure

    def synchronize(self) -> None:
        """Does nothing: there are no gradients to wait for."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing; DistributedOptimizer has the same method."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing; DistributedOptimizer has the same method."""

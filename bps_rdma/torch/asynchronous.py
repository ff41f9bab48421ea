# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer with BPS_ASYNC=1: servers keep the weights, and ranks add their changes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bps_rdma import Group, job
from bps_rdma.operations import Options, ReduceOp, accumulate_async, start, store
from bps_rdma.operations.compressed import NONE
from bps_rdma.torch.names import unique
from bps_rdma.torch.transfer import zeros_beside


class _Weights:
    """All parameters of one dtype, flat on the CPU, as the servers kept them when this rank last looked."""

    def __init__(self, name: str, parameters: list[torch.nn.Parameter]) -> None:
        self.name = name
        self._parameters = parameters
        count = sum(p.numel() for p in parameters)
        beside = torch.empty(0, dtype=parameters[0].dtype)
        self.known = zeros_beside(beside, count, beside.dtype)
        self.delta = zeros_beside(beside, count, beside.dtype)

    def read(self, into: torch.Tensor) -> None:
        """Copies the parameters."""
        for parameter, part in zip(self._parameters, self._parts(into), strict=True):
            part.copy_(parameter.detach().reshape(-1))

    def write(self) -> None:
        """Makes the parameters what is known of them."""
        for parameter, part in zip(self._parameters, self._parts(self.known), strict=True):
            parameter.detach().copy_(part.view_as(parameter))

    def _parts(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        begin = 0
        for parameter in self._parameters:
            yield flat[begin : begin + parameter.numel()]
            begin += parameter.numel()


class AsynchronousOptimizer(torch.optim.Optimizer):
    """What DistributedOptimizer() returns with BPS_ASYNC=1; see docs/async.md."""

    def _begin(self, named: Iterable[tuple[str, torch.nn.Parameter]], group: Group | None) -> None:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for _, parameter in named:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        prefix = unique("Weights")
        self._bps_weights = [
            _Weights(f"{prefix}.{str(dtype).removeprefix('torch.')}", parameters)
            for dtype, parameters in by_dtype.items()
        ]
        self._bps_group = group
        self._bps_store()

    def _bps_store(self) -> None:
        """The weights of the group's first rank become those of all, and those that the servers keep."""
        running = job.current()
        root = (self._bps_group or running.world).ranks[0]
        for weights in self._bps_weights:
            weights.read(weights.known)
            if running.staleness == 0:  # gradients of one step meet, as always: nothing has to be kept
                start.broadcast(weights.known, root, self._bps_options(weights)).wait()
            else:
                store(weights.known, root, weights.name, group=self._bps_group)
            weights.write()
        self._bps_epoch = running.epoch

    def _bps_options(self, weights: _Weights) -> Options:
        return Options(ReduceOp.sum, weights.name, 0, self._bps_group, None, True, NONE)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Steps with this rank's gradients, adds the change to the servers' weights, and takes these over.

        Raises:
            DeadlineError: the slowest rank is more than BPS_STALENESS steps behind, and has not caught up.
            PeerLostError: a server is lost, and with it the weights.
            RoundAbortedError: the job goes on with other ranks. This rank's weights are as its optimizer has left
                them; the next step first makes those of the lowest rank everyone's.
        """
        running = job.current()
        if running.epoch != self._bps_epoch:
            self._bps_store()
        result = super().step(closure, **options)
        for weights in self._bps_weights:
            weights.read(weights.delta)
            weights.delta.sub_(weights.known)
        if running.staleness == 0:
            for weights in self._bps_weights:
                start.reduce(weights.delta, weights.delta, self._bps_options(weights)).wait()
                weights.known.add_(weights.delta)
                weights.write()
            return result
        handles = [
            accumulate_async(w.delta, w.name, out=w.known, staleness=running.staleness, group=self._bps_group)
            for w in self._bps_weights
        ]
        for weights, handle in zip(self._bps_weights, handles, strict=True):
            handle.wait()
            weights.write()
        return result

    def synchronize(self) -> None:
        """Nothing: there are no gradients to wait for."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As in DistributedOptimizer; here it changes nothing."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As in DistributedOptimizer; here it changes nothing."""

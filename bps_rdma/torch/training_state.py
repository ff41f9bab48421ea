# SPDX-License-Identifier: Apache-2.0
"""TrainingState: what all ranks of a job must agree on when its members change."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from bps_rdma.torch import membership
from bps_rdma.torch.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from bps_rdma.torch.diloco import DiLoCo
from bps_rdma.torch.membership import View, unique
from bps_rdma.torch.sharded import ShardedOptimizer


class TrainingState:
    """A model, its optimizer, and values such as the number of the step, for a job whose members may change.

    Example::

        state = bps.TrainingState(model, optimizer, step=0)
        while state.step < steps:
            try:
                state.sync()
                train(state.step)
                state.step += 1
            except bps.RoundAbortedError:
                optimizer.zero_grad()

    sync() gives every rank what rank 0 has, whenever the job has other members than at the last call: at the start,
    without a member that was lost, and with one that has entered. Ranks keep their order and new ones get the last
    ranks, so rank 0 is one that has trained. Do not broadcast parameters or states yourself: a process that enters
    while the others train would do it alone.

    Args:
        model: a module, wrapped by DistributedDataParallel or not.
        optimizer: any optimizer of its parameters, distributed or not, or a DiLoCo. Of a ShardedOptimizer no rank has
            the whole state: its parameters and what is left of its state are divided anew, by reshard().
        values: what else the ranks agree on, under the names of their attributes; what broadcast_object() can send. Of
            one that has a state_dict(), such as an ElasticSampler or a learning-rate scheduler, the state is sent and
            loaded into each rank's own; of a torch.Generator it is sent and set.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | DiLoCo | None = None, **values: Any
    ) -> None:
        membership.init()
        self.model = model
        self.optimizer = optimizer
        self._names = tuple(values)
        self._prefix = unique("state", None)
        self._view: View | None = None  # for which it holds
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Values are attributes; this one does not exist."""
        raise AttributeError(f"{type(self).__name__} has no value {name!r}")

    def sync(self) -> None:
        """Takes over the state of rank 0 if the view is a new one; every rank calls it before each step.

        Raises:
            RoundAbortedError: a member was lost meanwhile; call it again.
            MismatchError: models or optimizers differ between ranks. PeerLostError, DeadlineError: as broadcast(), and
                as ShardedOptimizer.reshard().
        """
        view = membership.view()
        if view == self._view and not _lacks_state(self.optimizer):
            return
        sharded: set[torch.Tensor] = set()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.reshard()
            sharded = {param for group in self.optimizer.param_groups for param in group["params"]}
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        others = ((name, tensor) for name, tensor in tensors if tensor not in sharded)
        broadcast_parameters(others, 0, prefix=f"{self._prefix}.model.")
        if isinstance(self.optimizer, DiLoCo):
            self.optimizer.take_over()
        elif self.optimizer is not None and not sharded:
            broadcast_optimizer_state(self.optimizer, 0, prefix=f"{self._prefix}.optimizer.")
        values = {name: _packed(getattr(self, name)) for name in self._names}
        for name, value in broadcast_object(values, 0, name=f"{self._prefix}.values").items():
            mine = getattr(self, name)
            if isinstance(mine, torch.Generator):
                mine.set_state(value)
            elif hasattr(mine, "load_state_dict"):
                mine.load_state_dict(value)
            else:
                setattr(self, name, value)
        self._view = view


def _lacks_state(optimizer: Any) -> bool:
    """Whether it was made beside a rank that has just entered. All ranks know that alike."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer._view != membership.view()
    return isinstance(optimizer, DiLoCo) and optimizer._lacks_state


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value

# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs: ranks without inputs take part in what the others still do, with no gradients, until all are done.

Before each collective call of a step, an active rank announces it, and a rank without inputs listens. What a rank
without inputs calls then is the same, so all names and all orders are those of a job with even inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.errors import BpsError
from bps_rdma.torch.transfer import members_of

_attached: set[int] = set()  # ids of the Joinings whose blocks this process is in


def refuse_in_join(what: str) -> None:
    """Raises BpsError within a block of join(), for a collective call that a rank without inputs does not make."""
    if _attached:
        raise BpsError(
            f"{what} is called by all ranks, and in join() ranks without inputs do not call it",
            "give all ranks equally many batches, or use DistributedOptimizer",
        )


class Call(IntEnum):
    """What a rank announces."""

    none = 0  # it has no inputs any more
    buffers = 1  # a forward pass, which broadcasts buffers
    gradients = 2  # a pass, in which gradients become means


def scale(gradient: torch.Tensor, factor: float) -> None:
    """Multiplies a gradient in place. That of a detached sparse tensor would leave the tensor itself as it is."""
    values = gradient.detach() if gradient.layout is torch.strided else gradient._values()
    values.mul_(factor)


class Joining:
    """Held by a wrapper while it is in join().

    Args:
        name: of the announcements; the same on all ranks.
        group: who takes part; None: all workers.
        stops: raise on all ranks as soon as one has no inputs.
    """

    def __init__(self, name: str, group: Group | None, *, stops: bool) -> None:
        self._name, self._group, self._stops = f"{name}.join", group, stops
        self._ranks = list(members_of(group).ranks)
        self._is_listening = False
        self.active = self._ranks  # at the last announcement of a rank with inputs

    def announce(self, call: Call) -> None:
        """Tells the ranks without inputs of a call that follows.

        Raises:
            BpsError: a rank has none, and all were to stop then; or ranks announce different calls.
        """
        if not self._is_listening:
            self._exchange(call)

    @property
    def root(self) -> int:
        """The rank whose buffers count: the last one with inputs, as in torch."""
        return self.active[-1]

    @property
    def share(self) -> float:
        """What a mean over all ranks is to be multiplied by, to be one over those with inputs."""
        return len(self._ranks) / len(self.active)

    def shadow(self, calls: Mapping[Call, Callable[[], None]]) -> int:
        """Takes part in the calls of ranks that have inputs, until there are none. Returns the last of those ranks."""
        self._is_listening = True
        while (call := self._exchange(Call.none)) is not Call.none:
            calls[call]()
        return self.root

    def _exchange(self, call: Call) -> Call:
        own = np.array([call], np.int64)
        told = np.asarray(bps_rdma.all_gather(own, name=self._name, group=self._group)).tolist()
        active = [rank for rank, each in zip(self._ranks, told, strict=True) if each != Call.none]
        if not active:
            return Call.none
        without = [rank for rank in self._ranks if rank not in active]
        if self._stops and without:
            raise BpsError(
                f"worker {without[0]} has no inputs any more, and worker {active[0]} has",
                "give all ranks equally many batches, or do without throw_on_early_termination",
            )
        announced = {each for each in told if each != Call.none}
        if len(announced) > 1:
            raise BpsError(
                f"in join(), ranks {active} have begun different calls: some a forward pass, and some a backward pass",
                "make the same passes in the same order on all ranks that have inputs",
            )
        self.active = active
        return Call(announced.pop())


@contextlib.contextmanager
def joined(
    joining: Joining,
    attach: Callable[[Joining | None], None],
    calls: Mapping[Call, Callable[[], None]],
    finish: Callable[[int], None],
) -> Iterator[None]:
    """The block of join(): attaches `joining`, and after the block shadows the other ranks.

    Args:
        attach: called with `joining`, and with None in the end.
        calls: how a rank without inputs takes part.
        finish: called on all ranks with the rank that has made all steps.
    """
    attach(joining)
    _attached.add(id(joining))
    try:
        yield
        last = joining.shadow(calls)
    finally:
        attach(None)
        _attached.discard(id(joining))
    finish(last)

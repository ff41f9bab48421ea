# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs: ranks without inputs take part in what the others still do, with no gradients, until all are done.

Before each collective call of a step, an active rank announces it, and a rank without inputs listens. What a rank
without inputs calls then is the same, so all names and all orders are those of a job with even inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group
from bps_rdma.compression import Codec
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.torch.transfer import members_of

_attached: set[int] = set()  # ids of the Joinings whose blocks this process is in, in a job of several ranks


def refuse_in_join(what: str, instead: str = "use DistributedOptimizer") -> None:
    """Raises BpsError within a block of join(), for a collective call that a rank without inputs does not make."""
    if _attached:
        raise BpsError(
            f"{what} is called by all ranks, and in join() ranks without inputs do not call it",
            f"give all ranks equally many batches, or {instead}",
        )


def refuse_beside_join() -> None:
    """Raises BpsError within a block of join(), for what another wrapper does by all ranks."""
    if _attached:
        raise BpsError(
            "join() of one wrapper is running; ranks without inputs take no part in passes of another",
            "leave join() out if all ranks have equally many batches, or wrap one module that has both models in it",
        )


class Call(IntEnum):
    """What a rank announces."""

    none = 0  # it has no inputs any more
    buffers = 1  # a forward pass, which broadcasts buffers
    gradients = 2  # a pass, in which gradients become means


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


class UnevenInputs:
    """Held by a wrapper: within its join(), what it tells the ranks without inputs, and how it averages."""

    def __init__(self) -> None:
        self._joining: Joining | None = None  # within join()
        self._announced = False  # the pass, to the ranks without inputs
        self._scales = False  # means are over the ranks with inputs

    @property
    def joined(self) -> bool:
        """True within join()."""
        return self._joining is not None

    @contextlib.contextmanager
    def join(
        self,
        prefix: str,
        group: Group | None,
        calls: Mapping[Call, Callable[[], None]],
        finish: Callable[[int], None],
        *,
        compression: str | None,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> Iterator[None]:
        """Makes the block of a wrapper, in that of none, after which this rank shadows those that still have inputs.

        Args:
            prefix: of all names; the same on all ranks.
            group: who takes part; None: all workers.
            calls: how a rank without inputs takes part.
            finish: called on all ranks with the rank that has made all steps.
            compression: of the gradients; None: none.
            divide_by_initial_world_size, throw_on_early_termination: see DistributedDataParallel.join().
        """
        if not divide_by_initial_world_size and compression is not None and Codec(compression).momentum:
            raise InvalidArgumentError(
                f"{compression!r} has momentum, of which a rank without inputs gives the others more: "
                "divide_by_initial_world_size=False would scale that as if it were gradients",
                "leave momentum to the optimizer",
            )
        joining = Joining(prefix, group, stops=throw_on_early_termination)
        self._joining, self._announced, self._scales = joining, False, not divide_by_initial_world_size
        if bps_rdma.size() > 1:  # else nobody can wait for this rank
            _attached.add(id(joining))
        try:
            yield
            last = joining.shadow(calls)
        finally:
            self._joining = None
            _attached.discard(id(joining))
        finish(last)

    def announce_buffers(self) -> int | None:
        """A broadcast of buffers follows. Returns the rank whose buffers count; None outside of join().

        Raises:
            BpsError: this is the join() of another wrapper.
        """
        if self._joining is None:
            refuse_beside_join()
            return None
        self._joining.announce(Call.buffers)
        return self._joining.root

    @property
    def is_to_announce(self) -> bool:
        """True within join(), also of another wrapper, before announce_pass()."""
        return bool(_attached) and not self._announced

    def announce_pass(self) -> None:
        """A pass begins, in which gradients become means: tells those without inputs, once until end_pass().

        Raises:
            BpsError: this is the join() of another wrapper, whose ranks without inputs make no such pass.
        """
        if self._joining is None:
            refuse_beside_join()
        elif not self._announced:
            self._joining.announce(Call.gradients)
            self._announced = True

    def end_pass(self) -> None:
        """What is announced next is another pass."""
        self._announced = False

    def scale(self, gradients: Iterable[torch.Tensor]) -> None:
        """Makes means over all ranks those over the ranks with inputs, where that was asked for."""
        if self._joining is None or not self._scales or self._joining.share == 1:
            return
        for gradient in gradients:
            # That of a detached sparse tensor would leave the tensor itself as it is.
            values = gradient.detach() if gradient.layout is torch.strided else gradient._values()
            values.mul_(self._joining.share)

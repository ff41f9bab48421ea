# SPDX-License-Identifier: Apache-2.0
"""The parts of a model on which ranks that train alone agree one after the other; see diloco.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bps_rdma import job
from bps_rdma.agreement import group_of
from bps_rdma.arrays import core_dtype
from bps_rdma.compression import Codec
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.operations import OperationOptions
from bps_rdma.operations.options import EXACT, NONE
from bps_rdma.torch import transfer
from bps_rdma.torch.transfer import AnyHandle
from bps_rdma.uncompressed import Reason


@dataclass(frozen=True)
class Part:
    """Parameters that are agreed on together.

    Attributes:
        turn: from 0; parts of one turn are agreed on in the same steps.
    """

    turn: int
    parameters: list[torch.nn.Parameter]

    def flat(self) -> torch.Tensor:
        """Their values, one after the other, as wide as they are, and float32 at least."""
        return torch.cat([one.detach().flatten().to(_kept_in(one)) for one in self.parameters])

    def of_each(self, values: torch.Tensor) -> list[torch.Tensor]:
        """What flat() has joined."""
        parts = values.split([one.numel() for one in self.parameters])  # type: ignore[no-untyped-call]
        return [part.view(one.shape) for part, one in zip(parts, self.parameters, strict=True)]


@dataclass
class Fragment:
    """A part, and what is kept for it. All memory is flat, beside the parameters, in the dtype of Part.flat()."""

    part: Part
    options: OperationOptions
    anchor: torch.Tensor
    velocity: torch.Tensor
    moved: torch.Tensor  # the pseudo-gradient, then its mean
    handle: AnyHandle | None = None
    left: int = 0  # steps until the mean is waited for

    @property
    def name(self) -> str:
        """That of its sums."""
        assert self.options.name is not None
        return self.options.name

    def declaration(self) -> tuple[str, torch.Tensor, str | None]:
        """(name, the memory that will be sent, its compression)."""
        return self.name, self.moved, self.options.compression

    def begin(self, delay: int) -> None:
        """Sends how far this rank has moved, to be waited for after so many steps."""
        torch.sub(self.anchor, self.part.flat(), out=self.moved)
        self.handle = transfer.all_reduce(self.moved, self.options)
        self.left = delay

    def wait(self) -> None:
        """Waits for the mean; also once more, where a signal handler has raised something meanwhile."""
        if self.handle is not None and not self.handle.taken:
            try:
                self.handle.wait()
            except BpsError:
                self.handle = None
                raise

    def end(self, lr: float, momentum: float, mix: float) -> None:
        """Makes the step of the outer optimizer, and of the parameters what it gives."""
        self.handle = None
        self.velocity.mul_(momentum).add_(self.moved)
        self.anchor.sub_(self.moved + momentum * self.velocity, alpha=lr)
        values = self.anchor if mix == 0 else torch.lerp(self.anchor, self.part.flat(), mix)
        with torch.no_grad():
            for one, own in zip(self.part.parameters, self.part.of_each(values), strict=True):
                one.copy_(own)


def parts_of(parameters: Sequence[torch.nn.Parameter], count: int) -> list[Part]:
    """Runs of about equal numbers of elements, none of them empty; those of a run that are wider are another part."""
    parts = []
    for turn, run in enumerate(_runs(parameters, count)):
        for dtype in (torch.float32, torch.float64):
            own = [one for one in run if _kept_in(one) == dtype]
            if own:
                parts.append(Part(turn, own))
    return parts


def check_without_momentum(method: str | None) -> None:
    """Raises InvalidArgumentError for a compression that would change weights by more than ranks have moved them."""
    if method not in (None, NONE, EXACT) and Codec(method).momentum:
        raise InvalidArgumentError(
            f"{method!r} has momentum, which is that of gradients, and ranks agree on weights",
            "leave out its momentum; DiLoCo has outer_momentum",
        )


def without_momentum(options: OperationOptions, like: torch.Tensor) -> OperationOptions:
    """The options without a compression of BPS_COMPRESSION that has momentum, which is said."""
    running, kind = job.current(), core_dtype(like.dtype)
    method = running.compression(kind, like.numel(), options.compression)
    if method in ("", EXACT) or not Codec(method).momentum:
        return options
    assert options.name is not None
    number = group_of(running, options.group).id
    running.note_uncompressed(Reason.weights, number, options.name, method, kind, like.numel())
    return options._replace(compression=NONE)


def _kept_in(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _runs(parameters: Sequence[torch.nn.Parameter], count: int) -> list[list[torch.nn.Parameter]]:
    total = sum(one.numel() for one in parameters)
    runs: list[list[torch.nn.Parameter]] = [[]]
    seen = 0
    for index, one in enumerate(parameters):
        wants_next = seen >= total * len(runs) / count or len(parameters) - index <= count - len(runs)
        if runs[-1] and len(runs) < count and wants_next:
            runs.append([])
        runs[-1].append(one)
        seen += one.numel()
    return runs if parameters else []

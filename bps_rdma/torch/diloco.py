# SPDX-License-Identifier: Apache-2.0
"""DiLoCo and LocalSGD: ranks train alone for some steps, and then agree on what they have learnt.

After `every` steps each rank has moved away from the parameters that all had in common, the anchor. What it has moved,
anchor - parameter, is its pseudo-gradient; the mean of those of all ranks is what an outer optimizer, SGD with Nesterov
momentum, steps on from the anchor, and the result is the next anchor (Douillard et al., "DiLoCo", 2023). So a link
carries the parameters once per `every` steps, and compressed if that is wanted. With fragments, which take turns, and a
delay, training goes on while the means travel ("Streaming DiLoCo", 2025).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

import bps_rdma
from bps_rdma import job
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.handle import wait_each
from bps_rdma.kept_errors import keeping
from bps_rdma.operations.options import AnyCompression, text_of
from bps_rdma.presence import raised
from bps_rdma.torch import compression_state, membership, transfer
from bps_rdma.torch.broadcast import broadcast_parameters
from bps_rdma.torch.broadcast_objects import broadcast_objects
from bps_rdma.torch.check_alike import check_alike, digest_of_some
from bps_rdma.torch.checks import check_count, check_number
from bps_rdma.torch.fragments import Fragment, check_without_momentum, parts_of, without_momentum
from bps_rdma.torch.membership import AnyGroup, naming
from bps_rdma.torch.parameters import FixedParameters
from bps_rdma.torch.units import Sent
from bps_rdma.torch.wrapping import forgetting_scale, scaled_step


class DiLoCo:
    """Steps an optimizer on each rank alone, and brings the ranks together after every so many steps.

    Every rank must make the same number of steps. The constructor gives the optimizer's parameters, frozen ones too,
    the values that they have on the group's first rank.
    A copy, as by copy.deepcopy(), agrees with the copies of the other ranks.

        optimizer = DiLoCo(torch.optim.AdamW(model.parameters()), every=100, compression=Int8(feedback=True))
        optimizer.zero_grad(); loss.backward(); optimizer.step()

    Args:
        optimizer: the inner one, of floating-point parameters; use it where a scheduler wants an optimizer.
        named_parameters: as for DistributedOptimizer().
        every: steps from one agreement on a parameter to the next one.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        fragments: parts of the model that are agreed on one after the other, spread over `every` steps.
        delay: steps that are made while a mean travels; below `every`.
        mix: how much of what the rank has learnt by itself it keeps at an agreement: 0 none, 1 everything. With a
            delay, 0.5 keeps half of what it has learnt meanwhile.
        compression: how pseudo-gradients travel between hosts, as in Int8(feedback=True). Momentum is refused; with
            that of BPS_COMPRESSION they travel as they are.
        group: a group of bps_rdma or of torch.distributed; default: all workers.

    Attributes:
        inner: the inner optimizer.
        steps: so far.

    Raises:
        InvalidArgumentError: a number is out of its range, parameters' names are not unique, or the compression has
            momentum.
        InvalidTensorError, MismatchError: ranks disagree about the parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        every: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        compression: AnyCompression | None = None,
        group: AnyGroup = None,
    ) -> None:
        membership.init()
        self._fixed = FixedParameters(optimizer, named_parameters)
        named = self._fixed.named
        check_count("every", every, 1)
        check_count("delay", delay, 0)
        check_count("fragments", fragments, 1)
        check_number("mix", mix, 0, 1)
        if fragments > max(len(named), 1):
            raise InvalidArgumentError(f"fragments={fragments} of {len(named)} parameters", "use at most one for each")
        if delay >= every:
            raise InvalidArgumentError(f"every={every} and delay={delay}", "use 0 <= delay < every")
        wrong = [name for name, one in named if not one.is_floating_point()]
        if wrong:
            raise InvalidArgumentError(f"{wrong[0]!r} is not of a floating-point type", "leave it out of the optimizer")
        self.inner = optimizer
        self.steps = 0
        self._is_checked = False  # by _check_first(), since this was made or a state was loaded
        self._saved: list[str] = []  # digests of the parameters that belong to a state which was loaded
        self._copied: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # anchors and velocities
        self._every, self._delay, self._mix = every, delay, mix
        self._outer = outer_lr, outer_momentum
        self._group: Group | None = membership.group_of(group)
        self._method = text_of(compression)
        check_without_momentum(self._method)
        self._lacks_state = job.current().has_entrants  # some may be beyond this; see take_over()
        options = {
            "every": every, "outer_lr": outer_lr, "outer_momentum": outer_momentum, "fragments": fragments,
            "delay": delay, "mix": mix, "compression": self._method,
        }  # fmt: skip
        with naming("DiLoCo.begin", self._group) as begin:
            if not self._lacks_state:
                check_alike([f"{name} {value}" for name, value in options.items()], begin, self._group)
                root = self._group.ranks[0] if self._group else 0
                broadcast_parameters(self._fixed.all, root, f"{begin}.", self._group)
        self._parts, self._turns = parts_of([one for _, one in named], fragments), fragments
        self._fragments: list[Fragment] = []
        self._begin([part.flat() for part in self._parts], [])

    def _begin(self, anchors: list[torch.Tensor], velocities: list[torch.Tensor]) -> None:
        """Declares names of its own."""
        with naming("DiLoCo", self._group) as prefix:
            self._declare(prefix, anchors, velocities)

    def _declare(self, prefix: str, anchors: list[torch.Tensor], velocities: list[torch.Tensor]) -> None:
        sent = Sent(prefix, self._group, self._method)
        for number, (part, anchor) in enumerate(zip(self._parts, anchors, strict=True)):
            options = without_momentum(sent.options(f"{prefix}.{number}", 0, anchor.dtype, anchor.numel()), anchor)
            moved = transfer.zeros_beside(part.parameters[0], anchor.numel(), anchor.dtype)
            velocity = velocities[number] if velocities else torch.zeros_like(anchor)
            self._fragments.append(Fragment(part, options, anchor, velocity, moved))
        transfer.declare_each((one.declaration() for one in self._fragments), self._group)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without what is on its way: a copy agrees with other copies, under names of its own."""
        self.synchronize()
        copied = [one.anchor for one in self._fragments], [one.velocity for one in self._fragments]
        return {**self.__dict__, "_fragments": [], "_copied": copied if self._fragments else self._copied}

    def _settle(self) -> None:
        """Lets a copy begin before anything happens between ranks."""
        if not self._fragments and self._copied is not None:
            membership.init()
            try:
                self._begin(*self._copied)
            except BaseException:
                self._fragments = []  # it begins again, and may get another name
                raise
            self._copied = None

    def take_over(self) -> None:
        """All ranks go on from what the group's first rank has: its inner optimizer, steps, anchor and velocity.

        Collective; for a job whose members have changed: see TrainingState, which also sends the parameters. What was
        on its way is given up, and the next agreement starts from the last anchor.
        """
        for one in self._fragments:
            with contextlib.suppress(BpsError), keeping:  # it may say that this view has ended, too
                one.wait()
            one.handle = None
        self._settle()
        state, root = None, self._group.ranks[0] if self._group else 0
        if bps_rdma.rank() == root:
            state = [self.inner.state_dict(), self.steps, [(one.anchor, one.velocity) for one in self._fragments]]
        found = broadcast_objects(state, [root], "DiLoCo.state", self._group)[root]
        if bps_rdma.rank() != root:
            inner, self.steps, fragments = found
            self.inner.load_state_dict(inner)
            for one, (anchor, velocity) in zip(self._fragments, fragments, strict=True):
                one.anchor.copy_(anchor)
                one.velocity.copy_(velocity)
        self._lacks_state, self._is_checked, self._saved = False, False, []

    _step_supports_amp_scaling = True  # torch's GradScaler calls step() also where it has found an infinity

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients as the inner optimizer does."""
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of the inner optimizer, and then the agreements between ranks that are due.

        Returns:
            What the inner optimizer's step() returns.

        Raises:
            InvalidArgumentError: a parameter is trained that was not when this was made; names it.
            BpsError: a parameter has other values at the first step than this was made with, or than were saved with
                the state that was loaded; names it. Other ranks raise InvalidArgumentError then, which names the rank.
                Or this process entered a running job, and take_over() has not been called.
            MismatchError: ranks have loaded states of different steps.
            PeerLostError, DeadlineError: the ranks could not agree. RoundAbortedError: the same on every rank that is
                left. The step itself has been made, on the parameters of this rank; go on with the next one. The next
                agreement starts from the last anchor. Only the first step, in which ranks compare what they begin
                with, has not been made then.
        """
        with forgetting_scale(self):
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self._lacks_state:
            raise BpsError(
                "a process has entered the job, and not all ranks know what the others agreed on last",
                "pass the optimizer to TrainingState, and call sync() before each step",
            )
        self._settle()
        self._fixed.check(self.inner)
        if not self._is_checked:
            self._check_first()
        failure = self._end_interrupted()
        result = scaled_step(self, lambda: self.inner.step(closure), self._parameters())
        self.steps += 1
        for fragment in self._fragments:
            shift = fragment.part.turn * self._every // self._turns
            if (self.steps - shift) % self._every == 0 and self.steps >= self._every:
                fragment.begin(self._delay)
            elif fragment.handle is not None:
                fragment.left -= 1
        self._agree_on_due()
        if failure is not None:
            raise raised(failure)
        return result

    def _end_interrupted(self) -> BpsError | None:
        """Makes what agreements a step() has left that was interrupted; the other ranks have made them before this one.

        Returns:
            Why they could not be made, to be raised when the step is made: ranks count their steps.
        """
        try:
            with keeping:
                self._agree_on_due()
        except BpsError as error:
            return error
        return None

    def _agree_on_due(self) -> None:
        due = [one for one in self._fragments if one.handle is not None and one.left <= 0]
        if due:
            self._agree(due)

    def _check_first(self) -> None:
        """Refuses on all ranks what is wrong on one before the first step, so that none waits for another."""
        failure = self._wrong_anchor() or self._wrong_values()
        if self._fragments and not job.current().may_lose_members:  # there, not all might hear of a loss in it
            check_alike([f"made {self.steps} steps"], f"{self._fragments[0].name}.first", self._group, failure)
        elif failure:
            raise failure
        self._is_checked, self._saved = True, []

    def _wrong_anchor(self) -> BpsError | None:
        """A checkpoint that is loaded into the model alone would be left again at the first agreement."""
        if self.steps > 0 or self._outer == (1, 0):  # a plain mean does not depend on the anchor
            return None
        for one in self._fragments:
            for parameter, anchor in zip(one.part.parameters, one.part.of_each(one.anchor), strict=True):
                if not torch.allclose(parameter, anchor.to(parameter.dtype), rtol=0, atol=0, equal_nan=True):
                    return BpsError(
                        f"{self._fixed.name_of(parameter)!r} has other values than when the ranks agreed on it",
                        "load weights into the model before you wrap its optimizer, or load a state_dict() of both",
                    )
        return None

    def _wrong_values(self) -> BpsError | None:
        """Weights that were loaded before this was made have become those of another rank."""
        for parameter, digest in zip(self._parameters(), self._saved, strict=False):
            if digest_of_some(parameter) != digest:
                return BpsError(
                    f"{self._fixed.name_of(parameter)!r} has other values than when this state was saved",
                    "load the weights of the same checkpoint into the model, after its optimizer was wrapped; if they "
                    "are too old, call optimizer.state_dict() before the model's weights are saved: it ends agreements",
                )
        return None

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (one for each in self._fragments for one in each.part.parameters)

    def synchronize(self) -> None:
        """Waits for the agreements that are under way."""
        due = [one for one in self._fragments if one.handle is not None]
        if due:
            self._agree(due)

    def _agree(self, fragments: list[Fragment]) -> None:
        if not job.current().may_lose_members:
            wait_each(partial(self._agree_on, one) for one in fragments)  # each has its mean on all ranks, or on none
            return
        try:
            wait_each(one.wait for one in fragments)
            bps_rdma.commit(self._group)  # or some ranks would go on from an anchor that others do not have
        except BpsError:
            for one in fragments:
                one.handle = None
            raise
        for one in fragments:
            one.end(*self._outer, self._mix)

    def _agree_on(self, fragment: Fragment) -> None:
        fragment.wait()
        fragment.end(*self._outer, self._mix)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint of this rank, whose inner optimizer and compression feedback are its own.

        Waits for what is under way first, so that every rank must call it at the same step. That changes weights: call
        it before the model's weights are saved.
        """
        self._settle()
        self.synchronize()
        return {
            "inner": self.inner.state_dict(),
            "steps": self.steps,
            "values": [digest_of_some(one) for one in self._parameters()],
            "fragments": [
                {
                    "anchor": one.anchor.clone(),
                    "velocity": one.velocity.clone(),
                    "compression": compression_state.of_tensor(*one.declaration(), self._group),
                }
                for one in self._fragments
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of the same model in as many fragments. Every rank must call it.

        Load the weights of that checkpoint into the model, too, after this was made; step() compares some of them.

        Raises:
            InvalidArgumentError: it has other parameters, another number of fragments, or lacks what this
                compression remembers.
        """
        self._settle()
        sizes = [one["anchor"].numel() for one in state["fragments"]]
        if sizes != [one.anchor.numel() for one in self._fragments]:
            raise InvalidArgumentError("the checkpoint is of other parameters", "use the same model and `fragments`")
        # A state that was saved without compression, or by a version that did not know it, begins at nothing.
        remembered = [one.get("compression") for one in state["fragments"]]
        for one, pieces in zip(self._fragments, remembered, strict=True):
            if pieces is not None:
                compression_state.check_tensor(pieces, *one.declaration())
        self.synchronize()
        self.inner.load_state_dict(state["inner"])
        self.steps = state["steps"]
        self._is_checked, self._saved = False, state.get("values", [])
        for one, saved, pieces in zip(self._fragments, state["fragments"], remembered, strict=True):
            one.anchor.copy_(saved["anchor"])
            one.velocity.copy_(saved["velocity"])
            compression_state.load_tensor(pieces or {}, *one.declaration(), self._group)


def LocalSGD(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    every: int = 10,
    compression: AnyCompression | None = None,
    group: AnyGroup = None,
) -> DiLoCo:
    """DiLoCo whose ranks take the mean of their parameters after `every` steps (McMahan et al., 2016)."""
    return DiLoCo(
        optimizer,
        named_parameters,
        every=every,
        outer_lr=1.0,
        outer_momentum=0.0,
        compression=compression,
        group=group,
    )

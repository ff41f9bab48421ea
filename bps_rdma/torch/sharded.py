# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer: any optimizer that updates each parameter by itself, with the state of each on one rank only."""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

import bps_rdma
from bps_rdma import job
from bps_rdma.argument_types import check_root
from bps_rdma.errors import BpsError, InvalidArgumentError, MismatchError, PeerLostError, RoundAbortedError
from bps_rdma.torch import membership
from bps_rdma.torch.broadcast_objects import broadcast_objects
from bps_rdma.torch.check_alike import check_alike, optimizer_lines
from bps_rdma.torch.joining import refuse_in_join
from bps_rdma.torch.membership import AnyGroup, View
from bps_rdma.torch.resharding import Before, gather_holders, gather_hosts, move_states, send_parameters
from bps_rdma.torch.shards import Shards
from bps_rdma.torch.transfer import members_of

_OWN_KEYS = ("params", "param_names")  # keys of a parameter group that differ in the inner optimizer


class ShardedOptimizer(torch.optim.Optimizer):
    """Replaces `optimizer_cls(params, **kwargs)`, with the same results and 1/N of its state on each of N ranks.

    Each parameter belongs to one rank, which keeps its state and updates it; step() then broadcasts it to the others.
    All ranks must have the same parameters and gradients, as after DistributedDataParallel's backward, and on the same
    kind of device.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.01)

    Making one, step(), add_param_group() and state_dict() are collective: every rank of the group must call them.
    `state` holds this rank's part.

    In a job that goes on without lost workers (BPS_MIN_WORKERS) two ranks keep the state of each parameter and both
    update it, so that the loss of one rank loses nothing, and step() changes all parameters on all ranks or none. Pass
    the optimizer to TrainingState, whose sync() calls reshard().
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        group: AnyGroup = None,
        copies: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Joins the job first, if this process has not joined it; see bps_rdma.torch.init().

        Args:
            params: as for every optimizer: tensors, (name, tensor) pairs, or parameter groups.
            optimizer_cls: class of the optimizer, e.g. torch.optim.AdamW. LBFGS needs all parameters at once and is
                refused.
            group: a group of bps_rdma or of torch.distributed; default: all workers.
            copies: how many ranks keep the state of each parameter; with fewer ranks, all. `copies` - 1 of them may be
                lost at once. Each rank has copies/N of the state, and of the work of an update. Default: 2 in a job
                that goes on without lost workers (BPS_MIN_WORKERS), otherwise 1.
            kwargs: for `optimizer_cls`.

        Raises:
            InvalidArgumentError: `optimizer_cls` cannot be sharded, or `copies` is not positive. MismatchError:
                parameters differ between ranks.
            Errors of `optimizer_cls` itself; the other ranks then raise InvalidArgumentError.
        """
        membership.init()
        self._group = membership.group_of(group)
        self._inner: torch.optim.Optimizer | None = None
        self._version = 0  # the states here have one more with each step, and when they are loaded
        self._listed: list[list[torch.Tensor]] = []  # the parameters of each group
        self._compared = False  # the gradients were alike on all members of this view, in its first step
        self._view: View | None = None  # for which the states are complete
        self._held: set[torch.Tensor] = set()  # parameters whose state is here
        self._lost = 0  # parameters whose state was on lost ranks only
        with membership.naming("ShardedOptimizer", self._group):  # all ranks make it or none, if one is lost meanwhile
            self._make(params, optimizer_cls, copies, kwargs)

    def _make(
        self, params: Iterable[Any], optimizer_cls: type[torch.optim.Optimizer], copies: int | None, options: Any
    ) -> None:
        failure: Exception | None = None
        running = job.current()
        # A rank that has just entered may be alone here: the others have made theirs before. Then reshard() agrees.
        agrees = not running.has_entrants
        hosts = gather_hosts(members_of(self._group)) if running.may_lose_members and agrees else None
        try:
            _check_class(optimizer_cls)
            if copies is not None and copies < 1:
                raise InvalidArgumentError(f"copies is {copies}", "it counts the ranks that keep a state: 1 or more")
            self._shards = Shards(self._group, copies or (2 if running.may_lose_members else 1), hosts)
            defaults = optimizer_cls([{"params": []}], **options).defaults
            super().__init__(params, defaults)
            inner = optimizer_cls([self._own_part(each) for each in self.param_groups], **options)
        except Exception as error:
            failure = error
        if agrees:
            lines = [] if failure else [optimizer_cls.__name__, f"copies {copies}", *optimizer_lines(self)]
            check_alike(lines, "ShardedOptimizer", self._group, failure)
            self._view = membership.view()
        elif failure is not None:
            raise failure
        self._inner = inner
        self.state = inner.state
        self._listed = _listed(self)
        if not running.is_late:  # otherwise others may have made steps
            held = self._shards.mine(self._shards.params) if agrees else self._shards.params
            self._held = set(held)  # there is no state yet: every rank has all of it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, balanced with those that are there. Every rank must call it, with the same ones.

        Raises:
            MismatchError: ranks add different parameters. Errors of the optimizer itself; the other ranks then raise
                InvalidArgumentError. In both cases nothing is added on any rank. BpsError: as step().
        """
        inner = self._inner
        if inner is None:  # while it is being made
            super().add_param_group(param_group)
            self._shards.add(self.param_groups[-1]["params"])
            return
        agrees = self._view is not None  # else reshard() compares them
        if agrees:
            self._check_view()
        failure: Exception | None = None
        before = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            self._shards.add(self.param_groups[-1]["params"])
            inner.add_param_group(self._own_part(self.param_groups[-1]))
        except Exception as error:
            failure = error
        try:
            if agrees:
                check_alike(optimizer_lines(self), "ShardedOptimizer.add_param_group", self._group, failure)
                self._held = set(self._shards.mine(self._shards.params))
            elif failure is not None:
                raise failure
            elif not job.current().is_late:
                self._held = set(self._shards.params)
        except Exception:
            for group in self.param_groups[before:]:
                self._shards.drop(group["params"])
            del self.param_groups[before:], inner.param_groups[before:]
            raise
        self._listed = _listed(self)

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key not in _OWN_KEYS}
        return {**options, "params": self._shards.mine(group["params"])}

    # ---- Stepping

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates this rank's parameters, then everybody's. Every rank must call it.

        Args:
            closure: computes the loss and the gradients anew, as for every optimizer.
            kwargs: for the inner optimizer's step().

        Returns:
            What `closure` returned; None without one.

        Raises:
            RoundAbortedError: a member was lost, and the job goes on: no rank uses the step. The parameters that others
                own may have any value until reshard().
            PeerLostError, DeadlineError: a rank was lost or did not call step(); some parameters are then updated and
                others are not.
            MismatchError: in the first step of a view: gradients differ between ranks; nobody has averaged them.
            BpsError: members have changed, and reshard() has not been called; or the script has put other parameters
                into `param_groups`.
        """
        refuse_in_join("step() of a ShardedOptimizer")
        inner = self._inner
        assert inner is not None
        running = job.current()
        self._check_view()
        self._check_params()
        if self._lost:
            raise self._state_is_lost()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):  # e.g. from an LR scheduler
            own.update((key, value) for key, value in group.items() if key not in _OWN_KEYS)
        if not self._compared:
            self._check_gradients()
        before = Before(inner) if running.may_lose_members else None
        try:
            inner.step(**kwargs)
            self._shards.broadcast()
            bps_rdma.commit(self._group)
        except RoundAbortedError:
            if before is not None:
                before.restore(inner)
            raise
        self._take_options()
        self._version += 1
        return loss

    def _check_gradients(self) -> None:
        """Compares norms in the first step of a view: of each parameter only its owner's gradient has an effect."""
        members = members_of(self._group)
        params = [param for group in self.param_groups for param in group["params"]]
        name = f"ShardedOptimizer.norms {len(params)}"
        own = np.array([_norm(param.grad) for param in params])
        norms = bps_rdma.all_gather(own, name=name, group=members).reshape(members.size, -1)
        least, most = np.fmin.reduce(norms), np.fmax.reduce(norms)  # but those of ranks that have none, or NaN
        for place in np.flatnonzero(most > 1.01 * least)[:1]:  # clipped on each rank they may differ in last bits
            raise MismatchError(
                f"parameter {place} of shape {tuple(params[place].shape)} has other gradients on other ranks: their "
                f"norms are {least[place]:.6g} to {most[place]:.6g}",
                "average them first: wrap the model in DistributedDataParallel, and synchronise before step()",
            )
        self._compared = True

    def _check_view(self) -> None:
        if self._view != membership.view():
            raise BpsError(
                "the members of the job have changed, and the optimizer's state is still divided among the old ones",
                "call TrainingState.sync() before each step, or reshard() on all ranks",
            )

    def _check_params(self) -> None:
        now, before = _listed(self), self._listed
        alike = list(map(len, now)) == list(map(len, before))
        if not (alike and all(map(operator.is_, itertools.chain(*now), itertools.chain(*before)))):
            raise BpsError(
                "param_groups has other parameters than this optimizer has divided among the ranks",
                "add parameters by add_param_group(); to move, replace or remove some, make a new ShardedOptimizer",
            )

    def _take_options(self) -> None:
        """Copies the options of the inner optimizer's groups."""
        assert self._inner is not None
        for group, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update((key, value) for key, value in own.items() if key not in _OWN_KEYS)

    # ---- Views

    def reshard(self) -> None:
        """Divides what is left of the state among the members that there are now. TrainingState.sync() does it.

        Every rank of the group must call it after a RoundAbortedError, and in a process that has entered a running job,
        before the next forward. All parameters then have the value of a rank that keeps their state, and all options
        are those of the group's first rank. What survives stays where it is, as far as no rank gets more than its
        share and copies lie on several hosts.

        Raises:
            RoundAbortedError: a member was lost meanwhile; call it again.
            MismatchError: parameters differ between ranks.
            PeerLostError: the state of some parameters was on lost ranks only; on all ranks, and again by step() until
                load_state_dict() brings a state back.
        """
        inner = self._inner
        assert inner is not None
        view = membership.view()
        members = members_of(self._group)
        check_alike([type(inner).__name__, *optimizer_lines(self)], "ShardedOptimizer.reshard", self._group)
        params = self._shards.params
        holders, version = gather_holders(params, self._held, self._version, members)
        first = members.ranks[0]
        self._shards.reassign(members, holders, gather_hosts(members))
        moved = move_states(holders, self._shards, inner.state, members)
        send_parameters(holders, members)
        options = broadcast_objects(_options(self), [first], "ShardedOptimizer.options", self._group)[first]
        bps_rdma.commit(self._group)
        # This comes last: nothing that another rank may still need must be forgotten here.
        self._held = set(self._shards.mine(params))
        for param in [param for param in inner.state if param not in self._held]:
            del inner.state[param]
        inner.state.update(moved)
        for group, own, values in zip(self.param_groups, inner.param_groups, options, strict=True):
            group.update(values)
            own.update(self._own_part(group))
        self._version, self._view, self._compared = version, view, False
        self._lost = sum(1 for param in params if not holders[param] and param.requires_grad)
        if self._lost:
            raise self._state_is_lost()

    def _state_is_lost(self) -> PeerLostError:
        return PeerLostError(
            f"the state of {self._lost} parameters was on lost ranks only",
            "load a checkpoint on all ranks: the model's, and this optimizer's by load_state_dict(); more copies of "
            "each state (copies=3) survive more losses at once",
        )

    # ---- Saving and loading

    def __getstate__(self) -> dict[str, Any]:
        """Returns the usual state and this rank's part, for copies."""
        own = ("_group", "_inner", "_shards", "_version", "_listed", "_compared", "_view", "_held", "_lost")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def state_dict(self, root: int | None = None) -> dict[str, Any]:
        """Returns the whole state as an optimizer that is not sharded has it, for any number of ranks.

        Collective: every rank of the group must call it, also when only one of them saves it.

        Args:
            root: worker rank that gets it; the others get {} and need little memory. None: all ranks get it.

        Raises:
            InvalidArgumentError: `root` is not in the group. MismatchError: ranks name different roots.
            PeerLostError, DeadlineError: a rank was lost or did not call state_dict(). BpsError: as step().
        """
        self._check_view()
        self._check_params()
        if self._lost:
            raise self._state_is_lost()
        members = members_of(self._group)
        if root is not None:
            root = check_root(root, members.ranks)
        name = "ShardedOptimizer.state_dict"
        check_alike([f"root {root}"], name, self._group)
        params = [param for group in self.param_groups for param in group["params"]]
        rank = bps_rdma.rank()
        own = {
            place: self.state[param]
            for place, param in enumerate(params)
            if param in self.state and self._shards.keepers(param)[0] == rank
        }
        parts = broadcast_objects(own, members.ranks, name, self._group, keepers=None if root is None else [root])
        if root is not None and root != rank:
            return {}
        whole = dict(sorted((place, state) for part in parts.values() for place, state in part.items()))
        kept, self.state = self.state, collections.defaultdict(dict)
        try:
            self.state.update((params[place], state) for place, state in whole.items())
            return super().state_dict()  # with all hooks
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a whole state, as from state_dict() or from an optimizer that is not sharded.

        Not collective, but every rank must load the same state.

        Raises:
            ValueError: the state belongs to other parameter groups.
        """
        inner = self._inner
        assert inner is not None
        places = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        others = {place for place, param in zip(places, params, strict=False) if param not in self._held}
        state = {place: value for place, value in state_dict["state"].items() if place not in others}
        super().load_state_dict({**state_dict, "state": state})
        inner.__setstate__({"state": self.state, "param_groups": [self._own_part(each) for each in self.param_groups]})
        self.state = inner.state
        self._take_options()
        self._version += 1
        self._lost = 0


def _listed(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in _OWN_KEYS} for group in optimizer.param_groups]


def _norm(gradient: torch.Tensor | None) -> float:
    if gradient is None or gradient.layout not in (torch.strided, torch.sparse_coo):
        return math.nan
    dense = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
    return float(torch.linalg.vector_norm(dense.abs() if dense.is_complex() else dense, dtype=torch.float64))


def _check_class(optimizer_cls: Any) -> None:
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, torch.optim.Optimizer)):
        raise InvalidArgumentError(
            f"{optimizer_cls!r} is not a subclass of torch.optim.Optimizer", "pass e.g. torch.optim.AdamW"
        )
    if issubclass(optimizer_cls, (torch.optim.LBFGS, ShardedOptimizer)):
        raise InvalidArgumentError(
            f"{optimizer_cls.__name__} does not update each parameter by itself", "use it without ShardedOptimizer"
        )

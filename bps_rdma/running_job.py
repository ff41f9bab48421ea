# SPDX-License-Identifier: Apache-2.0
"""The state that a process keeps from init() to shutdown()."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any, TypeVar

from bps_rdma import _core, arrays, failover, uncompressed
from bps_rdma.group import Group

T = TypeVar("T")

_EXACT = ("exact", "exact:to_odd")  # sums that are declared like compressions, and are none
_MANY_NAMES = 65536  # no model has so many; a program with other names in each step does
_MOST_FAILED = 256  # operations that are remembered; no rank is further behind than that


class Job:
    """Everything that lives from init() to shutdown().

    Args:
        process: this process in the core.
        config: the settings that init() used.
        world: the group of all workers.
    """

    def __init__(self, process: _core.Process, config: _core.Config, world: Group) -> None:
        self.process = process
        self.config = config
        self.world = world
        self.groups: dict[int, Group] = {0: world}
        self.tensors: dict[tuple[int, str], _core.Tensor] = {}
        self._warned_of_names = False
        self.epoch = process.epoch  # that of the first view from which this rank can go on with everything
        # This rank has entered a job that was running or suspended, and has to get the state from the others.
        self.is_late = process.is_late
        self.has_entrants = process.has_entrants  # some rank has; all ranks of the view know alike
        self.identities: list[int] = process.identities
        self._compression: str = config.text("BPS_COMPRESSION")
        self._exact: bool = config.text("BPS_EXACT") == "1"
        self.remembers = not self._exact and uncompressed.remembers(self._compression)  # BPS_COMPRESSION does
        self.min_compress_bytes: int = config.integer("BPS_MIN_COMPRESS_BYTES")
        # The driver by which the core copies arrays of GPUs; None: it does not.
        self.cuda_library: str | None = config.text("BPS_CUDA_LIB") if config.text("BPS_DEVICE_ROUTE") == "1" else None
        self.asynchronous: bool = config.text("BPS_ASYNC") == "1"
        staleness: int = config.integer("BPS_STALENESS")
        self.staleness: int | None = None if staleness < 0 else staleness
        self.may_lose_members = config.integer("BPS_MIN_WORKERS") > 0
        self.goes_on = False  # it has everything that was under way in the view before, unless another rank has not
        self.numbering = failover.Numbering()
        # Operations that the end of an earlier view has interrupted; those that are repeated under a name of their own;
        # and the last ones that failed at deadlines of earlier views.
        self.interrupted: list[failover.InterruptedOperation] = []
        self.repeats: list[failover.InterruptedOperation] = []
        self.failed: dict[failover.Which, _core.Suspended] = {}
        self.views = {id(process): self.numbering.keys}  # keys of groups, by process
        # Key, group and ranks of the groups to be made in this view.
        self.lost_groups: list[tuple[str, Group, tuple[int, ...]]] = []
        self.compressed: dict[failover.Name, str] = {}  # names of earlier views, and how they travelled
        self.window_start = time.monotonic()
        self.window_bytes = 0
        self._parts: dict[type[Any], Any] = {}
        self._making = threading.RLock()

    def part(self, kind: type[T]) -> T:
        """The one object of this class that belongs to the job: made at first use, and closed when the job ends.

        Faces keep their state here instead of in module globals, so that two jobs of one process share nothing.

        Args:
            kind: called without arguments; if its objects have a method close(), it is called after shutdown(). When
                a view ends they are closed and made anew, unless the class has a true `outlives_view`.
        """
        found: T | None = self._parts.get(kind)
        if found is None:
            with self._making:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = kind()
        return found

    def compression(self, dtype: _core.Dtype, elements: int, wanted: str | None) -> str:
        """Returns the compression to declare a name with; "" means none. `wanted` is None if the settings decide."""
        if wanted == "exact" or (wanted is None and self._exact):
            return "exact" if dtype in arrays.FLOATING else ""  # sums of integers are exact anyway
        if wanted is not None:
            return "" if wanted == "none" else wanted
        return "" if uncompressed.why_not(dtype, elements, self.min_compress_bytes) else self._compression

    def remark(
        self,
        group: int,
        name: str,
        dtype: _core.Dtype,
        elements: int,
        wanted: str | None,
        op: _core.ReduceOp = _core.ReduceOp.sum,
    ) -> None:
        """Says, on one rank, that the compression of a new name has no effect on reductions by `op`, if so.

        Of tensors that are not floating point nobody expects that BPS_COMPRESSION has one.
        """
        method = self._compression if wanted is None else wanted
        if method in ("", "none", *_EXACT) or dtype not in arrays.FLOATING:
            return
        reason = uncompressed.why_not(dtype, elements, self.min_compress_bytes) if wanted is None else None
        if reason is None and op not in (_core.ReduceOp.sum, _core.ReduceOp.average):
            reason = uncompressed.Reason.op
        if reason is not None:
            self.note_uncompressed(reason, group, name, method, dtype, elements)

    def note_uncompressed(
        self, reason: uncompressed.Reason, group: int, name: str, method: str, dtype: _core.Dtype, elements: int
    ) -> None:
        """Says, on the first rank of a group, that `method` has no effect on its tensor."""
        if self.groups[group].ranks[0] == self.process.rank:
            self.part(uncompressed.Remarks).note(reason, name, method, dtype, elements, self.min_compress_bytes)

    def note_unnamed(self, group: Group) -> None:
        """Says, on the first rank of a group, that BPS_COMPRESSION has no effect on a tensor without a name."""
        if group.ranks[0] == self.process.rank:
            self.part(uncompressed.Remarks).note_unnamed(self._compression)

    def declare(self, specs: list[tuple[int, str, _core.Dtype, int, str, str]]) -> list[_core.Tensor]:
        """Announces names in this view: (group, name, dtype, elements, shape, compression) each."""
        declared: list[_core.Tensor] = self.process.declare(specs)
        for spec, tensor in zip(specs, declared, strict=True):
            key = spec[0], spec[1]
            with self._making:  # the first of several threads sets the round, before any of them uses it
                if key not in self.tensors:
                    begun = self.numbering.begun(tensor)
                    if begun:
                        tensor.next_round = begun
                self.tensors[key] = tensor
            if spec[5] and spec[5] not in _EXACT:
                self._note_compressed(tensor, spec[5])
        if len(self.tensors) >= _MANY_NAMES and not self._warned_of_names and self.process.rank == 0:
            self._warned_of_names = True
            warnings.warn(
                f"{len(self.tensors)} names have been declared, of late {specs[-1][1]!r}: each of them takes 2 KB, on "
                "every rank and server and with the scheduler, until the job ends; use the same names in every step",
                RuntimeWarning,
                stacklevel=4,
            )
        return declared

    def _note_compressed(self, tensor: _core.Tensor, method: str) -> None:
        if not tensor.plain_because:
            self.part(uncompressed.Remarks).note_applied()
        elif tensor.elements > 0:
            reason = uncompressed.Reason(tensor.plain_because)
            self.note_uncompressed(reason, tensor.group, tensor.name, method, tensor.dtype, tensor.elements)

    def add_group(self, key: str, number: int, group: Group) -> None:
        """Notes a group that has been made, under a key that it keeps in all views."""
        self.groups[number] = group
        self.numbering.keys[number] = key

    def all_groups(self) -> list[tuple[str, Group, tuple[int, ...]]]:
        """The groups but the world, with their keys and ranks, in an order that is the same on all their members."""
        made = [
            (self.numbering.keys[number], group, group.ranks) for number, group in self.groups.items() if number != 0
        ]
        return sorted([*made, *self.lost_groups], key=lambda each: each[0])

    def next_rounds(self) -> dict[failover.Name, int]:
        """The first round of each name, counted from init() on, that this rank has not begun."""
        return failover.next_rounds(self.numbering, self.tensors.values())

    def take_interrupted(self) -> list[failover.InterruptedOperation]:
        """Returns the operations that the end of this view has interrupted; the process has been renewed."""
        found = list(self.interrupted)
        for operation in self.process.take_incomplete():
            own = [each for each in self.repeats if each.operation is operation]
            each = own[0] if own else self.numbering.interrupted(operation)
            if operation.has_failed:
                self.failed[each.which] = operation
            else:
                found.append(each)
        self.failed = dict(list(self.failed.items())[-_MOST_FAILED:])
        return found

    def go_on(self) -> None:
        """Completes what _next_view() has begun, together with all other ranks.

        Raises:
            RoundAbortedError: this view has ended, too; the next one goes on from here.
        """
        while self.lost_groups:
            key, group, members = self.lost_groups[0]
            number = self.process.new_group(list(members), f"{key} of a view before", self.process.timeout_s)
            group._become(Group(number, members))
            self.add_group(key, number, group)
            self.lost_groups.pop(0)
        if not self.process.survives_servers or self.process.epoch == 1:
            return
        ranks = {number: group.ranks for number, group in self.groups.items()}
        mine = failover.report(self.epoch, self.numbering, ranks, self.next_rounds(), self.interrupted, self.failed)
        reports = [failover.RankReport.decode(data) for data in failover.exchange(self.process, mine.encode())]
        if not failover.can_go_on(reports, self.process.epoch):
            self._begin_anew()
            return
        plan = failover.plan(reports)
        failover.give(
            self.process, plan, self.interrupted, {key: number for number, key in self.numbering.keys.items()}
        )
        self.numbering.first = plan.first
        for which in plan.failed.keys() & self.failed.keys():
            self._refuse(which, self.failed[which], plan)
        while self.interrupted:
            self._continue(self.interrupted[0], plan)
            self.interrupted.pop(0)

    def _begin_anew(self) -> None:
        """Gives up what was under way in the view before, on all ranks, because some rank cannot go on with it."""
        self.goes_on = False
        self.epoch = self.process.epoch
        self.numbering.next.clear()
        self.views = {id(self.process): self.numbering.keys}
        self.failed = {}
        while self.interrupted:
            self.interrupted.pop().operation.abort()
        lasting = self.take_lasting_parts()
        self.close()
        self._parts.update(lasting)
        _core.release_orphans(all=True)

    def _continue(self, each: failover.InterruptedOperation, plan: failover.Continuation) -> None:
        number = self.numbering.number_of(each.name[0])
        tensor = self._declare_like(each.operation, each.name) if each.which in plan.again else None
        if each.which in plan.failed and each.which not in self.failed:
            self._refuse(each.which, each.operation, plan)
            self.failed[each.which] = each.operation
        repeat = failover.resume(self.process, plan, each, number, tensor)
        if repeat is not None:
            self.repeats.append(repeat)

    def _refuse(self, which: failover.Which, operation: _core.Suspended, plan: failover.Continuation) -> None:
        """Lets an operation that has failed end for ranks that have not begun it: they would wait for the others."""
        name, number = which
        if number >= plan.first[name]:
            tensor = self._declare_like(operation, name)
            self.process.refuse(tensor, operation, number - plan.first[name], plan.failed[which])

    def _declare_like(self, operation: _core.Suspended, name: failover.Name) -> _core.Tensor:
        key = self.numbering.number_of(name[0]), name[1]
        if key not in self.tensors:
            old = operation.tensor
            self.declare([(*key, old.dtype, old.elements, old.shape, old.compression)])
        return self.tensors[key]

    def take_lasting_parts(self) -> dict[type[Any], Any]:
        """The parts that outlive a view, which are no longer this object's."""
        lasting = [kind for kind in list(self._parts) if getattr(kind, "outlives_view", False)]
        return {kind: self._parts.pop(kind) for kind in lasting}

    def close(self) -> None:
        """Ends all parts; called when none of the job's operations is in progress any more."""
        while self._parts:
            _, part = self._parts.popitem()
            if hasattr(part, "close"):
                part.close()

# SPDX-License-Identifier: Apache-2.0
"""A worker of a trial whose job goes on without lost members: steps of operations, each committed by all ranks.

Each rank contributes other values to each step of each view, so that a contribution too many or too few shows, and one
of another view. It says what happens in lines of JSON (CHAOS_REPORT), and takes commands on its standard input: `break`
(its connections), `stop` (end after the next step, on all ranks) and `check` after the end.
"""

import contextlib
import gc
import hashlib
import json
import os
import random
import re
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from worker import Checked, Commands, Guarded, Report, check

import bps_rdma as bps
from bps_rdma import job

CYCLE = 3  # steps after which the same values are summed again, where bits are compared
THINKS_S = 0.004  # at most, between two operations


class View:
    """Who is in the job now. Ranks are numbered anew in each view; `origins` are the numbers that they began with."""

    def __init__(self, origin_of: dict[int, int]) -> None:
        now = job.current()  # goes into the next view, if there is one
        self.number: int = now.process.epoch
        self.era: int = now.epoch  # the first view with these workers: their calls go on from one to the next
        self.rank: int = now.process.rank
        self.servers: int = now.process.servers
        self.origins = [origin_of[identity] for identity in now.process.identities]


class Operation(Checked):
    """One tensor: starts an operation of a step, and checks its result."""

    def __init__(self, spec: dict[str, Any], index: int, group: Any) -> None:
        super().__init__(spec, index)
        in_group = self.is_in_group
        self.group = group if in_group and spec["group"] else None
        self.takes_part = self.group is not None or not (in_group and spec["group"])
        self.renew()

    def renew(self) -> None:
        """Other memory, perhaps where the old one lay. Sizes of parts depend on the view: there is room for all."""
        both = self.kind in ("reduce_scatter", "all_gather")
        self.held = [Guarded(self.memory, self.count) for _ in range(1 + both)]

    def _constant(self, rank: int, step: int) -> int:
        return (rank * 17 + step * 5 + self.index * 29 + self.view.era * 11) % 61 - 30

    def start(self, view: View, step: int) -> Any:
        self.view = view
        ranks = self.group.ranks if self.group is not None else range(len(view.origins))
        self.ranks = list(ranks)
        self.origins = [view.origins[rank] for rank in ranks]
        place, size = self.origins.index(self.rank), len(self.origins)
        self.part = slice(*bps.shard_bounds(self.count, size, place))
        first = self.held[0].array
        own = self._own(self.rank, step)
        options: dict[str, Any] = {"name": self.name, "group": self.group}
        length = self.part.stop - self.part.start
        if self.kind == "all_gather":
            first[:length] = own[self.part]
            return bps.all_gather_async(first[:length], out=self.held[1].array, **options)
        first[:] = own
        if self.kind == "reduce_scatter":
            return bps.reduce_scatter_async(first, average=False, out=self.held[1].array[:length], **options)
        if self.kind == "broadcast":
            return bps.broadcast_async(first, root=self.ranks[step % size], **options)
        if self.kind == "push_pull_copy":
            return bps.push_pull_async(first, average=False, **options)
        return bps.push_pull_async_inplace(first, average=False, **options)

    def wrong(self, result: Any, step: int) -> str:
        """What is wrong with a result; "" if nothing is."""
        found = self.difference(result, self.origins, step)
        return f"{self.name}, step {step}, view {self.view.number} of {self.view.origins}: {found}" if found else ""


class Bits:
    """A sum that is rounded: as long as the workers are the same its bits are, whatever happens to servers."""

    COUNT = 50_000  # several partitions

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.array = np.empty(self.COUNT, np.float32)
        self.known: dict[tuple[tuple[int, ...], int], int] = {}

    def start(self, step: int) -> Any:
        self.array[:] = np.random.default_rng([self.origin, step % CYCLE]).standard_normal(self.COUNT)
        return bps.push_pull_async_inplace(self.array, average=False, name="bits")

    def check(self, view: View, step: int) -> tuple[int, str]:
        """A checksum, and what is wrong."""
        found = zlib.crc32(self.array.data)
        expected = self.known.setdefault((tuple(view.origins), step % CYCLE), found)
        return found, "" if found == expected else f"step {step}, view {view.number}: a sum has other bits than before"


class Worker:
    """The steps, until the end or an error that is final."""

    def __init__(self) -> None:
        self.spec = json.loads(os.environ["CHAOS_SPEC"])
        self.commands = Commands()
        self.report = Report()
        self.random = random.Random(f"{self.spec['seed']}/{self.spec['rank']}")
        self.step = 0  # committed ones
        self.history = hashlib.blake2b(digest_size=8)  # of all committed steps
        self.told: set[int] = set()  # of the end of which views

    def run(self) -> None:
        before = descriptors()
        bps.init()
        self.origin_of = {identity: rank for rank, identity in enumerate(job.current().process.identities)}
        group = bps.new_group(self.spec["group"]) if self.spec["rank"] in self.spec["group"] else None
        everything = [Operation(self.spec, i, group) for i in range(len(self.spec["tensors"]))]
        self.operations = [one for one in everything if one.takes_part]
        self.bits = Bits(self.spec["rank"])
        self.flags = np.zeros(2, np.int64)
        ended = False
        while not ended:
            try:
                ended = self.make_step()
            except bps.RoundAbortedError as error:
                self.note_end_of_view(str(error))
            except bps.BpsError as error:
                self.report("error", kind=type(error).__name__, text=str(error))
                break
        self.report("ended", steps=self.step)
        bps.shutdown()
        self.report("over")
        self.commands.wait("check")
        check(self.operations, self.report)
        del group, everything
        self.operations.clear()
        gc.collect()
        for left in sorted(descriptors() - before):
            # librdmacm closes a device at no time, and the monitor of this process's memory never ends.
            if "infiniband" not in left and "userfaultfd" not in left:
                self.report("violation", text=f"after shutdown() a descriptor is open: {left}")
        self.report("checked")

    def make_step(self) -> bool:
        """One step, committed by all ranks; whether it was the last one."""
        view = View(self.origin_of)
        if self.random.random() < 0.2:
            check(self.operations, self.report)
            self.random.choice(self.operations).renew()
        check(self.operations, self.report)
        checksums = self.make_sums(view)
        asked = bool(self.flags[1])
        bps.commit()
        self.history.update(repr((self.step, view.era, view.origins, checksums)).encode())
        self.step += 1
        self.report("step", number=self.step, view=view.number, members=view.origins, servers=view.servers,
                    history=self.history.hexdigest())  # fmt: skip
        if self.step == CYCLE + 1:
            self.report("ready")
        return asked

    def make_sums(self, view: View) -> list[int]:
        """The operations of a step; checksums of what is the same on all ranks. Raises the first error of any."""
        self.flags[:] = 1 << self.spec["rank"], self.commands.pending("stop")
        errors: list[bps.BpsError] = []
        pending: list[tuple[Any, Any]] = []
        starts = [(one, lambda one=one: one.start(view, self.step)) for one in self.operations]
        starts.append((self.bits, lambda: self.bits.start(self.step)))
        starts.append((self.flags, lambda: bps.push_pull_async_inplace(self.flags, average=False, name="flags")))
        for one, start in self.random.sample(starts, len(starts)):
            self.act()
            try:
                pending.append((one, start()))
            except bps.BpsError as error:
                errors.append(error)
                break  # the next call would be one of the next view
        checksums = [0] * len(self.spec["tensors"])
        for one, handle in pending:
            self.act()
            try:
                result = bps.synchronize(handle)
            except bps.BpsError as error:
                errors.append(error)
                continue
            if not isinstance(one, Operation):
                continue
            if wrong := one.wrong(result, self.step):
                self.report("violation", text=wrong)
            if one.group is None and one.kind != "reduce_scatter":
                checksums[one.index] = zlib.crc32(np.ascontiguousarray(result).data)
        for one in self.operations:
            one.release()
        if errors:
            raise next((error for error in errors if not isinstance(error, bps.RoundAbortedError)), errors[0])
        if self.flags[0] != sum(1 << origin for origin in view.origins):
            self.report("violation", text=f"view {view.number} of {view.origins}: contributions of {self.flags[0]:b}")
        checksum, wrong = self.bits.check(view, self.step)
        if wrong:
            self.report("violation", text=wrong)
        return [*checksums, checksum]

    def note_end_of_view(self, text: str) -> None:
        """A rank is told once of the end of a view."""
        self.report("aborted", text=text)
        ended = re.search(r"view (\d+) of \d+ workers has ended", text)
        if ended is None or int(ended[1]) in self.told:
            self.report("violation", text=f"told twice of the end of a view, or of none: {text}")
        else:
            self.told.add(int(ended[1]))

    def act(self) -> None:
        """What the campaign has asked for happens in the middle of a step."""
        if self.commands.take("break"):
            self.report("broken", connections=break_connections())
        if self.random.random() < 0.5:
            time.sleep(self.random.uniform(0, THINKS_S))


def break_connections() -> int:
    """Shuts each TCP connection of this process down, but that to the scheduler. Returns how many."""
    ended = 0
    for described in descriptors():
        number, _, what = described.partition(": ")
        if not what.startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as one:  # some listen, or are gone
            if one.family == socket.AF_INET and one.getpeername()[1] != int(os.environ["DMLC_PS_ROOT_PORT"]):
                one.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def descriptors() -> set[str]:
    """The open ones of this process, and what they are."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found.add(f"{path.name}: {path.readlink()}")
    return found


if __name__ == "__main__":
    Worker().run()

# SPDX-License-Identifier: Apache-2.0
"""A worker of a chaos trial: rounds of operations whose results, arrays and surroundings are checked.

It says what happens in lines of JSON (CHAOS_REPORT) and takes commands on its standard input: `stop` (rank 0: end after
this round, on all ranks), `exception`, `exit`, `leave`, `thread` (another one leaves), `late`, and `check` after the
end.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import bps_rdma as bps

PAGE = 4096
CANARY, MINE = 0xA5, 42.0


class Commands:
    """What has been asked for on the standard input.

    Args:
        leave: is called by a thread of its own when "thread" is asked for.
    """

    def __init__(self, leave: Callable[[], None] = lambda: None) -> None:
        self._leave = leave
        self._asked: set[str] = set()
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        text = b""
        # os.read, because sys.stdin would hold a lock that the end of the interpreter wants.
        while data := os.read(0, 100):
            text += data
            *words, text = text.split(b"\n")
            if b"thread" in words:
                threading.Thread(target=self._leave).start()
            with self._changed:
                self._asked |= {word.decode() for word in words}
                self._changed.notify()
        with self._changed:
            self._asked.add("check")  # the campaign is gone
            self._changed.notify()

    def pending(self, word: str) -> bool:
        return word in self._asked

    def take(self, word: str) -> bool:
        with self._changed:
            found = word in self._asked
            self._asked.discard(word)
            return found

    def wait(self, word: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: word in self._asked)


class Report:
    """Lines of JSON that the campaign reads."""

    def __init__(self) -> None:
        self._fd = os.open(os.environ["CHAOS_REPORT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, what: str, **more: Any) -> None:
        os.write(self._fd, (json.dumps({"what": what, "at": time.monotonic()} | more) + "\n").encode())


class Guarded:
    """An array with a canary page before and after it. Between calls all of it holds MINE."""

    def __init__(self, memory: str, count: int) -> None:
        size = 4 * count + 2 * PAGE
        self._all = bps.empty(size, "uint8") if memory == "mapped" else np.empty(size, np.uint8)
        self._all.fill(CANARY)
        self.array = self._all[PAGE : PAGE + 4 * count].view(np.float32)
        self.release()

    def release(self) -> None:
        """The call that used it has returned or raised."""
        self.array.fill(MINE)

    def fault(self) -> str:
        """Whether somebody wrote to it since then, or ever around it."""
        bad = np.flatnonzero(self.array != MINE)
        if len(bad):
            return f"{len(bad)} of {len(self.array)} elements changed after the call, one to {self.array[bad[0]]}"
        around = np.concatenate([self._all[:PAGE], self._all[-PAGE:]])
        return "" if (around == CANARY).all() else "bytes around an array changed"


class Checked:
    """One tensor: the arrays of its operations, and what their results must be."""

    held: list[Guarded]
    part: slice  # this rank's, of a reduce_scatter

    def __init__(self, spec: dict[str, Any], index: int) -> None:
        self.kind, self.count, self.is_in_group = spec["tensors"][index]
        self.name = f"{self.kind} {index}"
        self.memory = spec["memory"]
        self.index = index
        self.rank = spec["rank"]
        self.pattern = (np.arange(self.count) % 8).astype(np.float32)

    def _constant(self, rank: int, step: int) -> int:
        return (rank * 17 + step * 5 + self.index * 29) % 61 - 30

    def _own(self, rank: int, step: int) -> Any:
        return self.pattern + self._constant(rank, step)

    def difference(self, result: Any, ranks: Sequence[int], step: int) -> str:
        """What is wrong with the result of a step of these ranks; "" if nothing is."""
        if self.kind == "broadcast":
            expected = self._own(ranks[step % len(ranks)], step)
        elif self.kind == "all_gather":
            expected = np.empty(self.count, np.float32)
            for place, rank in enumerate(ranks):
                part = slice(*bps.shard_bounds(self.count, len(ranks), place))
                expected[part] = self._own(rank, step)[part]
        else:
            expected = self.pattern * len(ranks) + sum(self._constant(rank, step) for rank in ranks)
            if self.kind == "reduce_scatter":
                expected = expected[self.part]
        bad = np.flatnonzero(result != expected)
        return f"{len(bad)} elements are wrong: {result[bad[0]]} for {expected[bad[0]]}" if len(bad) else ""

    def faults(self) -> list[str]:
        return [f"{self.name}: {fault}" for one in self.held if (fault := one.fault())]

    def release(self) -> None:
        for one in self.held:
            one.release()


def check(operations: list[Any], report: Report) -> None:
    """Nobody has written to the arrays of these operations since their last calls."""
    for one in operations:
        for fault in one.faults():
            report("violation", text=fault)
        one.release()


class Operation(Checked):
    """One tensor: starts an operation of a round, and checks its result."""

    def __init__(self, spec: dict[str, Any], index: int, world: Any, group: Any) -> None:
        super().__init__(spec, index)
        in_group = self.is_in_group
        self.group = group if in_group and group is not None else world
        self.takes_part = not (in_group and spec["group"]) or group is not None
        self.size = self.group.size if self.takes_part else 1
        self.place = self.group.ranks.index(self.rank) if self.takes_part else 0
        begin, end = bps.shard_bounds(self.count, self.size, self.place)
        self.part = slice(begin, end)
        self.renew()

    def renew(self) -> None:
        """Other memory, perhaps where the old one lay."""
        lengths = {"reduce_scatter": (self.count, self.part.stop - self.part.start),
                   "all_gather": (self.part.stop - self.part.start, self.count)}  # fmt: skip
        self.held = [Guarded(self.memory, max(length, 1)) for length in lengths.get(self.kind, (self.count,))]

    def start(self, round_: int) -> Any:
        first = self.held[0].array
        own = self._own(self.rank, round_)
        sent = own[self.part] if self.kind == "all_gather" else own
        first[: len(sent)] = sent
        options: dict[str, Any] = {"name": self.name, "group": self.group}
        if self.kind == "push_pull":
            return bps.push_pull_async_inplace(first, average=False, **options)
        if self.kind == "push_pull_copy":
            return bps.push_pull_async(first, average=False, **options)
        if self.kind == "broadcast":
            return bps.broadcast_async(first, root=self.group.ranks[round_ % self.size], **options)
        begin, end = self.part.start, self.part.stop
        out = self.held[1].array[: end - begin] if self.kind == "reduce_scatter" else self.held[1].array
        if self.kind == "reduce_scatter":
            return bps.reduce_scatter_async(first, average=False, out=out, **options)
        return bps.all_gather_async(first[: end - begin], out=out, **options)

    def wrong(self, result: Any, round_: int) -> str:
        """What is wrong with a result; "" if nothing is."""
        found = self.difference(result, self.group.ranks, round_)
        return f"{self.name}, round {round_}: {found}" if found else ""


class Left(Exception):  # noqa: N818  # nothing is wrong
    """This rank has left the job in the middle of a round."""


class Worker:
    """The rounds, until the end or an error that is final."""

    def __init__(self) -> None:
        self.spec = json.loads(os.environ["CHAOS_SPEC"])
        self.report = Report()
        self.commands = Commands(self.leave)
        if self.spec.get("handles_term"):
            signal.signal(signal.SIGTERM, self.leave_and_exit)
        self.random = random.Random(f"{self.spec['seed']}/{self.spec['rank']}")

    def run(self) -> None:
        bps.init()
        group = bps.new_group(self.spec["group"]) if self.spec["rank"] in self.spec["group"] else None
        world = bps.Group(0, tuple(range(self.spec["workers"])))
        everything = [Operation(self.spec, i, world, group) for i in range(len(self.spec["tensors"]))]
        self.operations = [one for one in everything if one.takes_part]
        self.flag = np.zeros(1, np.float32)
        round_ = 0
        with contextlib.suppress(Left):
            while self.round(round_):
                if round_ == 0:
                    self.report("ready")
                round_ += 1
                if round_ % 5 == 0:
                    self.report("round", number=round_)
        self.report("ended", rounds=round_)
        bps.shutdown()
        self.report("over")
        self.commands.wait("check")
        check(self.operations, self.report)
        self.report("checked")

    def round(self, number: int) -> bool:
        """One round; False when there is no next one."""
        for one in self.random.sample(self.operations, 1):
            if self.random.random() < 0.2:
                check(self.operations, self.report)
                one.renew()
        check(self.operations, self.report)
        # Rank 0 says in a sum whether this is the last round.
        self.flag[0] = 1.0 if self.commands.pending("stop") and self.spec["rank"] == 0 else 0.0
        over, errors = False, []
        try:
            over = bool(bps.push_pull_inplace(self.flag, False, "flag")[0] != 0)
        except bps.BpsError as error:
            errors.append(error)
        try:
            self.call_scheduler(number)
        except bps.BpsError as error:
            errors.append(error)
        pending = []
        for one in self.random.sample(self.operations, len(self.operations)):
            self.act()
            try:
                pending.append((one, one.start(number)))
            except bps.BpsError as error:
                errors.append(error)
                one.release()
        for one, handle in pending:
            self.act()
            try:
                if wrong := one.wrong(bps.synchronize(handle), number):
                    self.report("violation", text=wrong)
            except bps.BpsError as error:
                errors.append(error)
            one.release()
        for error in errors:
            self.report("error", kind=type(error).__name__, text=str(error))
        goes_on = self.spec["goes_on"] and all(not isinstance(error, bps.PeerLostError) for error in errors)
        return not over and (not errors or goes_on)

    def call_scheduler(self, number: int) -> None:
        """In some rounds ranks also wait in calls that the scheduler answers."""
        if not self.spec.get("makes_groups") or number % 4 == 3:
            return
        ranks = range(self.spec["workers"])
        if number % 4 == 0:
            bps.barrier()
        elif number % 4 == 1:
            bps.new_group(list(ranks), f"all {number}")
        elif self.spec["rank"] in self.spec["group"]:
            bps.new_group(self.spec["group"], f"some {number}")

    def leave(self) -> None:
        """Leaves the job in order."""
        self.report("leaves")
        bps.shutdown()

    def leave_and_exit(self, *_: Any) -> None:
        """The handler of a signal."""
        self.leave()
        sys.exit(0)

    def act(self) -> None:
        """What the campaign has asked for happens in the middle of a round."""
        if self.commands.take("exception"):
            self.report("leaves")
            raise ValueError("asked for by the campaign")
        if self.commands.take("exit"):
            self.report("leaves")
            sys.exit(3)
        if self.commands.take("leave"):
            self.leave()
            for one in self.operations:  # those in progress have ended with shutdown()
                one.release()
            raise Left
        if self.commands.take("late"):
            time.sleep(self.spec["late_s"])


if __name__ == "__main__":
    Worker().run()

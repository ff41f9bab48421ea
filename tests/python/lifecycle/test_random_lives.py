# SPDX-License-Identifier: Apache-2.0
"""Several lives of a job, groups, freed and reused arrays, deadlines and retries, in orders that hypothesis thinks up.

Two ranks, each a process with a server inside. After each step all arrays that no call uses, and what is around them,
are as their owner left them; each result is right, or its call raised.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

PROGRAM = str(Path(__file__).with_name("random_lives_rank.py"))
COUNTS = st.sampled_from([1, 1000, 200_000])
MEMORY = st.sampled_from(["plain", "mapped"])
KINDS = st.sampled_from(["push_pull", "copy", "broadcast"])
SHORT_S, LONG_S = 0.3, 10.0
LONG = bool(os.environ.get("BPS_TEST_ALL"))


class Ranks(harness.Members):
    """Two processes that do what they are told; see random_lives_rank.py."""

    def __init__(self) -> None:
        super().__init__()
        self.owed = 0  # answers that nobody has read
        common = {"BPS_SECRET": os.urandom(16).hex(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for rank in (0, 1):
            env = harness.clean_env(**harness.of_rank(rank, 2, 0), **common)
            self.command(f"rank {rank}", [sys.executable, PROGRAM], env, told=True, answers=True)

    def tell(self, rank: int, do: str, **arguments: Any) -> None:
        self.processes[f"rank {rank}"].tell(json.dumps({"do": do} | arguments))
        self.owed += 1

    def answer(self, rank: int) -> Any:
        line = self.processes[f"rank {rank}"].answer()
        self.owed -= 1
        return json.loads(line)

    def both(self, do: str, **arguments: Any) -> list[Any]:
        for rank in (0, 1):
            self.tell(rank, do, **arguments)
        return self.answers()

    def answers(self) -> list[Any]:
        return [self.answer(rank) for rank in (0, 1)]


class Lives(RuleBasedStateMachine):
    ranks: Ranks | None = None  # of all examples: they need a second to start

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[int] = []
        self.made = self.value = 0
        self.alive = False

    def own(self, rank: int) -> float:
        return 100.0 * self.value + rank

    def expected(self, kind: str) -> float:
        return self.own(0) if kind == "broadcast" else self.own(0) + self.own(1)

    def check_results(self, kind: str, found: list[dict[str, Any]]) -> None:
        for rank, one in enumerate(found):
            assert not one["error"], f"rank {rank}: {one['error']}"
            assert one["lowest"] == one["highest"] == self.expected(kind), f"rank {rank}: {one}"

    # ---- Lives

    @initialize()
    def begin(self) -> None:
        if self.ranks is not None and self.ranks.owed:  # the example before has failed
            self.end_ranks()
        if self.ranks is None:
            Lives.ranks = Ranks()
        self.ranks.both("reset")

    @classmethod
    def end_ranks(cls) -> None:
        ranks, Lives.ranks = cls.ranks, None
        if ranks is not None:
            ranks.__exit__(None, None, None)

    @precondition(lambda self: not self.alive)
    @rule(transport=st.sampled_from(["shm", "tcp"]))
    def init(self, transport: str) -> None:
        self.ranks.both("init", port=harness.free_port(), transport=transport)
        self.alive = True
        self.groups = [0]

    @precondition(lambda self: self.alive)
    @rule()
    def shutdown(self) -> None:
        self.ranks.both("shutdown")
        self.alive = False

    @precondition(lambda self: self.alive)
    @rule()
    def new_group(self) -> None:
        self.groups.append(len(self.groups))
        self.ranks.both("group", number=self.groups[-1], ranks=[0, 1])

    # ---- Arrays

    @rule(memory=MEMORY, count=COUNTS)
    def make(self, memory: str, count: int) -> None:
        assume(len(self.arrays) < 6)
        self.made += 1
        self.ranks.both("make", number=self.made, memory=memory, count=count)
        self.arrays.append(self.made)

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.arrays))
        self.ranks.both("free", number=number)
        self.arrays.remove(number)

    # ---- Operations

    def _draw(self, data: st.DataObject) -> dict[str, Any]:
        self.value += 1
        return {
            "number": data.draw(st.sampled_from(self.arrays)),
            "kind": data.draw(KINDS),
            "group": data.draw(st.sampled_from(self.groups)),
            "timeout": LONG_S,
        }

    def _tell_call(self, rank: int, do: str, what: dict[str, Any]) -> None:
        self.ranks.tell(rank, do, value=self.own(rank), **what)

    @precondition(lambda self: self.alive and self.arrays)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        what = self._draw(data)
        for rank in (0, 1):
            self._tell_call(rank, "call", what)
        self.check_results(what["kind"], self.ranks.answers())

    @precondition(lambda self: self.alive and self.arrays)
    @rule(data=st.data(), late=st.integers(0, 1))
    def call_too_late(self, data: st.DataObject, late: int) -> None:
        """One rank calls when the other has given up. Both raise, and then both try again."""
        what = self._draw(data)
        punctual = 1 - late
        self._tell_call(punctual, "call", what | {"timeout": SHORT_S})
        error = self.ranks.answer(punctual)["error"]
        assert error.startswith("DeadlineError"), error or "no error"
        self._tell_call(late, "call", what)
        found = self.ranks.answer(late)
        assert found["error"], f"rank {late} got {found} of a round that the other rank has left"
        self.value += 1
        for rank in (0, 1):
            self._tell_call(rank, "call", what)
        self.check_results(what["kind"], self.ranks.answers())

    @precondition(lambda self: self.alive and self.arrays)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """An operation whose handle is dropped, and with it the array."""
        what = self._draw(data)
        for rank in (0, 1):
            self._tell_call(rank, "drop", what)
        self.ranks.answers()
        self.arrays.remove(what["number"])

    @precondition(lambda self: self.alive and self.arrays)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def leave_in_the_middle(self, data: st.DataObject, rank: int) -> None:
        """The job ends while a rank waits for an operation in which the other takes no part."""
        what = self._draw(data)
        self._tell_call(rank, "leave", what)
        self.ranks.tell(1 - rank, "shutdown")
        assert self.ranks.answer(rank)
        self.ranks.answer(1 - rank)
        self.alive = False

    @invariant()
    def nothing_has_changed(self) -> None:
        faults = [fault for found in self.ranks.both("check") for fault in found]
        assert not faults, faults


@pytest.mark.timeout(600)
def test_arrays_and_results_in_any_order():
    try:
        run_state_machine_as_test(
            Lives,
            settings=settings(
                max_examples=600 if LONG else 50,
                stateful_step_count=30 if LONG else 20,
                deadline=None,
                database=None,
                # Shrinking repeats real jobs for minutes; the steps that failed are printed without it.
                phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    finally:
        Lives.end_ranks()

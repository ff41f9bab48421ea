# SPDX-License-Identifier: Apache-2.0
"""What a trial of leaving does: drawn from the seed and the trial's number alone, so that it can be repeated."""

import random
from dataclasses import dataclass
from typing import Any

from tests.chaos import plan

# shutdown() between two calls, beside the calls of another thread, or in a handler of SIGTERM; a SIGTERM that nobody
# handles; an exception that nobody catches; the end of the interpreter.
WAYS = ("leave", "thread", "handler", "term", "exception", "exit")

TIMEOUT_S = 90.0  # of everything: whoever is not told waits for that long
HEARTBEAT_S = 15.0


@dataclass(frozen=True)
class Leaver:
    """A member that leaves, `after_s` seconds after the one before it."""

    member: str
    way: str
    after_s: float


@dataclass(frozen=True)
class LeavingTrial(plan.Trial):
    """One job, and who leaves it. The first of `leavers` is also `victim`."""

    leavers: tuple[Leaver, ...] = ()

    def describe(self) -> str:
        """One line for people."""
        who = ", ".join(f"{one.member} by {one.way}" for one in self.leavers)
        return f"{who}; {super().describe().partition('; ')[2]}"

    @property
    def survivors(self) -> list[int]:
        """Ranks that do not leave before they are told."""
        gone = {one.member for one in self.leavers}
        return [rank for rank in range(self.workers) if f"worker {rank}" not in gone]


def draw(seed: int, number: int, transports: tuple[str, ...]) -> LeavingTrial:
    """The trial of this number."""
    rng = random.Random(f"{seed}/{number}/leaving")
    job = plan.draw(seed, number, transports, ("exit",))  # of two ranks or more, if they are the servers
    workers = max(job.workers, 2)
    left = [f"worker {rank}" for rank in range(workers)]
    rng.shuffle(left)
    leavers = []
    for _ in range(rng.choice([1, 1, 2])):
        helpers = ["scheduler", *(f"server {index}" for index in range(job.servers))] if job.servers else []
        if helpers and rng.random() < 0.25:
            leavers.append(Leaver(rng.choice(helpers), "term", rng.uniform(0, 0.3)))
        elif len(left) > 1:
            leavers.append(Leaver(left.pop(), rng.choice(WAYS), rng.uniform(0, 0.3)))
    if len({one.member for one in leavers}) < len(leavers):
        leavers.pop()
    fields = vars(job) | {"workers": workers, "event": "leave", "victim": leavers[0].member}
    return LeavingTrial(**fields, leavers=tuple(leavers))


def spec(trial: LeavingTrial, rank: int) -> dict[str, Any]:
    """What a worker process must know."""
    ways = {one.way for one in trial.leavers if one.member == f"worker {rank}"}
    return plan.spec(trial, rank) | {"makes_groups": True, "handles_term": "handler" in ways}

# SPDX-License-Identifier: Apache-2.0
"""What a trial does: drawn from the seed and the trial's number alone, so that it can be repeated."""

import random
from dataclasses import dataclass
from typing import Any

# The victim is gone, or counts as lost: every other rank gets an error.
LETHAL = ("kill", "segfault", "stop", "exception", "exit", "cut")
# Nothing may change: a pause is shorter than the heartbeat's limit.
BENIGN = ("pause", "freeze", "none")
# A rank calls after the others' deadlines: calls raise, and the job goes on.
EVENTS = (*LETHAL, *BENIGN, "late")

START_S = 40.0
HEARTBEAT_S = 2.5
PAUSE_S = 1.0
TIMEOUT_S = 7.0  # more than twice HEARTBEAT_S: a cut network is told from a paused machine by then
SHORT_TIMEOUT_S = 0.6  # of trials with a late rank
SHUTDOWN_S = 1.0

# 8 bytes to 3 MB.
COUNTS = (2, 250, 5_000, 70_000, 750_000)
KINDS = ("push_pull", "push_pull_copy", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True)
class Tensor:
    """One operation of every round. `group`: whether only the first ranks take part, see Trial.group."""

    kind: str
    count: int
    group: bool


@dataclass(frozen=True)
class Trial:
    """One job and what happens to it."""

    seed: int
    number: int
    workers: int
    servers: int  # 0: every worker is a server
    transport: str
    memory: str  # plain or mapped
    event: str
    victim: str  # "worker 1", "server 0", "scheduler"
    direction: str  # of a cut: both, out, in (as the victim sees it)
    plane: str  # of a cut: all, control, data
    delay_s: float  # from the moment when all ranks are in their rounds
    tensors: tuple[Tensor, ...]
    hosts: str = ""  # by rank, one letter per host: ranks take this machine for several hosts

    @property
    def needs_network(self) -> bool:
        return self.event == "cut"

    @property
    def members(self) -> list[str]:
        """All processes of the job."""
        dedicated = ["scheduler", *(f"server {i}" for i in range(self.servers))] if self.servers else []
        return dedicated + [f"worker {i}" for i in range(self.workers)]

    @property
    def group(self) -> list[int]:
        """The ranks of the job's second group; empty: there is none."""
        return list(range(self.workers - 1)) if self.workers > 2 else []

    def describe(self) -> str:
        """One line for people."""
        what = self.event if self.event == "none" else f"{self.event} {self.victim}"
        if self.event == "cut":
            what += f" ({self.plane}, {self.direction})"
        servers = f"{self.servers} servers" if self.servers else "embedded"
        workers = f"{self.workers} workers" + (f" on hosts {self.hosts}" if self.hosts else "")
        return f"{what}; {workers}, {servers}, {self.transport}, {self.memory} memory"


def draw(seed: int, number: int, transports: tuple[str, ...], events: tuple[str, ...]) -> Trial:
    """The trial of this number."""
    rng = random.Random(f"{seed}/{number}")
    event = rng.choice(events)
    workers = rng.randint(1, 4)
    servers = rng.randint(0, 3)
    if event in ("cut", "late") or (servers == 0 and event in LETHAL):
        workers = max(workers, 2)  # somebody must be left to tell the tale
    own_roles = ["worker"] if event in ("exception", "exit", "late") else ["worker", "server", "scheduler"]
    role = rng.choice(own_roles if servers else ["worker"])
    victim = {
        "worker": f"worker {rng.randrange(workers)}",
        "server": f"server {rng.randrange(max(servers, 1))}",
        "scheduler": "scheduler",
    }[role]
    plane = rng.choice(["all", "control"] if role == "scheduler" else ["all", "control", "data"])
    tensors = tuple(
        # The first one is for all ranks, so that each has something to do.
        Tensor(rng.choice(KINDS), rng.choice(COUNTS), rng.random() < 0.25 and index > 0)
        for index in range(rng.randint(2, 6))
    )
    transport = "tcp" if event == "cut" else rng.choice(transports)
    memory = rng.choice(["plain", "mapped"])
    direction, delay_s = rng.choice(["both", "out", "in"]), rng.uniform(0, 0.4)
    hosts = ""
    if workers > 2 and event != "cut" and "rdma" not in transports and rng.random() < 0.5:
        hosts = rng.choice(["aab", "aba", "abb"]) + ("" if workers == 3 else rng.choice("abc"))
        transport = "auto"
    return Trial(
        seed=seed,
        number=number,
        workers=workers,
        servers=servers,
        transport=transport,
        memory=memory,
        event=event,
        victim=victim,
        direction=direction,
        plane=plane,
        delay_s=delay_s,
        tensors=tensors,
        hosts=hosts,
    )


def culprits(trial: Trial, pid: int) -> list[str]:
    """Patterns of which an error of a surviving rank must contain one.

    The victim's process id names a dedicated server, because servers get their numbers in the order in which they join.
    """
    role, _, index = trial.victim.partition(" ")
    names = {"worker": [rf"(worker|rank) {index}\b"], "server": [rf"pid {pid}\b"], "scheduler": ["scheduler"]}[role]
    if role == "worker" and trial.servers == 0:
        names.append(rf"server {index}\b")
        if index == "0":
            names.append("scheduler")
    return names


def spec(trial: Trial, rank: int) -> dict[str, Any]:
    """What a worker process must know."""
    return {
        "rank": rank,
        "workers": trial.workers,
        "memory": trial.memory,
        "goes_on": trial.event == "late",
        "late_s": 3 * SHORT_TIMEOUT_S,
        "group": trial.group,
        "seed": f"{trial.seed}/{trial.number}",
        "tensors": [[one.kind, one.count, one.group] for one in trial.tensors],
    }

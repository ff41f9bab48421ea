# SPDX-License-Identifier: Apache-2.0
"""What a trial does whose job goes on without the members that it loses: drawn from the seed and the trial's number."""

import random
from dataclasses import dataclass
from typing import Any

from tests.chaos.plan import COUNTS, KINDS, Tensor

START_S = 40.0
HEARTBEAT_S = 1.5
PAUSE_S = 0.5  # shorter than the heartbeat's limit
TIMEOUT_S = 20.0  # longer than any recovery
SHUTDOWN_S = 3.0
# Between two committed steps, beyond the time in which the loss can be noticed: a few seconds on a busy machine. (Alone
# it takes a tenth of one, see docs/reliability.md.)
RECOVERY_S = 4.0

# What is noticed only because the member is silent.
SILENT = ("stop", "cut")
# After these the member is lost for good.
LETHAL = ("kill", *SILENT)


@dataclass(frozen=True)
class Fault:
    """One thing that happens."""

    kind: str  # kill; stop, and go on once the others have noticed; pause; break a connection; cut off; restart
    victim: str  # "worker 1", "server 0", "scheduler"
    after_s: float  # since the one before, or since the moment when all ranks were at work
    length_s: float = 0.0  # restart: until another scheduler is started


@dataclass(frozen=True)
class Scenario:
    """A kind of trial.

    Attributes:
        faults: what happens, and to whom.
        failover: BPS_SERVER_FAILOVER; None: drawn, where there are servers.
        gap_s: the longest time between two faults. Short ones fall into the change of the view.
    """

    faults: tuple[tuple[str, str], ...]
    failover: bool | None = None
    gap_s: float = 0.0


SCENARIOS = (
    Scenario((("kill", "worker"),)),
    Scenario((("kill", "server"),), failover=True),
    Scenario((("restart", "scheduler"),)),
    Scenario((("kill", "worker"), ("kill", "worker")), gap_s=0.05),
    Scenario((("kill", "worker"), ("kill", "server")), failover=True, gap_s=0.05),
    Scenario((("stop", "worker"),)),
    Scenario((("kill", "server"), ("kill", "server")), failover=True, gap_s=0.1),
    Scenario((("break", "worker"),), failover=False),
    Scenario((("kill", "server"),), failover=False),
    Scenario((("kill", "worker"), ("restart", "scheduler")), gap_s=0.2),
    Scenario((("stop", "server"),), failover=True),
    Scenario((("kill", "server"), ("restart", "scheduler")), failover=True, gap_s=0.2),
    Scenario((("cut", "worker"),)),
    Scenario((("pause", "worker"),)),
    Scenario((("kill", "server"), ("kill", "worker")), gap_s=0.1),
    Scenario((("cut", "server"),), failover=True),
    Scenario((("stop", "worker"), ("kill", "worker")), gap_s=2.0),
)


@dataclass(frozen=True)
class ViewsTrial:
    """One job and what happens to it."""

    seed: int
    number: int
    workers: int
    servers: int  # 0: every worker is a server
    failover: bool
    transport: str
    memory: str  # plain or mapped
    faults: tuple[Fault, ...]
    tensors: tuple[Tensor, ...]
    hosts: str = ""  # by rank, one letter per host: ranks take this machine for several hosts

    @property
    def members(self) -> list[str]:
        """All processes of the job."""
        return [
            "scheduler",
            *(f"server {i}" for i in range(self.servers)),
            *(f"worker {i}" for i in range(self.workers)),
        ]

    @property
    def needs_network(self) -> bool:
        """Whether each member is in a network namespace of its own."""
        return any(fault.kind == "cut" for fault in self.faults)

    @property
    def group(self) -> list[int]:
        """The ranks of the job's second group, at its start."""
        return list(range(self.workers - 1)) if self.workers > 2 else []

    @property
    def lost(self) -> set[str]:
        """The members that are not there any more afterwards."""
        return {fault.victim for fault in self.faults if fault.kind in LETHAL}

    @property
    def survivors(self) -> list[int]:
        """The workers that go on."""
        return [rank for rank in range(self.workers) if f"worker {rank}" not in self.lost]

    @property
    def servers_left(self) -> int:
        """How many servers the last view has."""
        everybody = self.members if self.servers else [f"worker {i}" for i in range(self.workers)]
        role = "server" if self.servers else "worker"
        return sum(1 for member in everybody if member.startswith(role) and member not in self.lost)

    @property
    def is_unseen(self) -> bool:
        """Whether no call of a worker that is left may raise anything."""
        return all(
            fault.kind == "pause" or (self.failover and (fault.victim.startswith("server") or fault.kind == "restart"))
            for fault in self.faults
        )

    @property
    def stands_still_s(self) -> float:
        """The longest time between two committed steps."""
        longest = RECOVERY_S
        for fault in self.faults:
            longest += {"pause": PAUSE_S, "restart": fault.length_s + 1, "break": 0, "kill": 0}.get(
                fault.kind, HEARTBEAT_S
            )
        return longest

    def describe(self) -> str:
        """One line for people."""
        what = " and ".join(f"{fault.kind} {fault.victim}" for fault in self.faults)
        servers = f"{self.servers} servers" if self.servers else "embedded"
        failover = " with failover" if self.failover else ""
        workers = f"{self.workers} workers" + (f" on hosts {self.hosts}" if self.hosts else "")
        return f"{what}; {workers}, {servers}{failover}, {self.transport}, {self.memory} memory"


def draw(seed: int, number: int, transports: tuple[str, ...]) -> ViewsTrial:
    """The trial of this number. Scenarios come in turn, so that a short campaign has most of them."""
    rng = random.Random(f"{seed}/views/{number}")
    # Connections are cut and broken as those of TCP; over rdma tests/rdma does that.
    needs_tcp = ("break", "cut")
    possible = [one for one in SCENARIOS if "tcp" in transports or all(kind not in needs_tcp for kind, _ in one.faults)]
    scenario = possible[number % len(possible)]
    kinds = [kind for kind, _ in scenario.faults]
    roles = [role for _, role in scenario.faults]
    lost = {
        role: sum(1 for kind, of in scenario.faults if of == role and kind in LETHAL) for role in ("worker", "server")
    }
    workers = lost["worker"] + rng.randint(2, 3)
    servers = lost["server"] + rng.randint(1, 2) if "server" in roles else rng.choice([0, 1, 2])
    failover = scenario.failover
    if failover is None:
        failover = rng.random() < 0.5
    workers_drawn = rng.sample(range(workers), roles.count("worker"))
    servers_drawn = rng.sample(range(max(servers, 1)), roles.count("server"))
    faults = []
    for kind, role in scenario.faults:
        victim = "scheduler"
        if role != "scheduler":
            victim = f"{role} {(workers_drawn if role == 'worker' else servers_drawn).pop()}"
        after_s = rng.uniform(0, scenario.gap_s) if faults else rng.uniform(0, 0.3)
        faults.append(Fault(kind, victim, after_s, rng.uniform(0, 0.5)))
    transport = "tcp" if any(kind in needs_tcp for kind in kinds) else rng.choice(transports)
    hosts = ""
    if "rdma" not in transports and not any(kind in needs_tcp for kind in kinds) and rng.random() < 0.3:
        hosts = "".join(rng.choice("ab") for _ in range(workers))
        transport = "auto"
    tensors = tuple(
        Tensor(rng.choice(KINDS), rng.choice(COUNTS), rng.random() < 0.25 and index > 0)
        for index in range(rng.randint(2, 4))
    )
    return ViewsTrial(
        seed=seed,
        number=number,
        workers=workers,
        servers=servers,
        failover=failover and servers > 0,
        transport=transport,
        memory=rng.choice(["plain", "mapped"]),
        faults=tuple(faults),
        tensors=tensors,
        hosts=hosts,
    )


def spec(trial: ViewsTrial, rank: int) -> dict[str, Any]:
    """What a worker process must know."""
    return {
        "rank": rank,
        "workers": trial.workers,
        "memory": trial.memory,
        "group": trial.group,
        "seed": f"{trial.seed}/{trial.number}",
        "tensors": [[one.kind, one.count, one.group] for one in trial.tensors],
    }

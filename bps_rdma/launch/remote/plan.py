# SPDX-License-Identifier: Apache-2.0
"""Which process of a job runs on which host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.remote.hostfile import Slots

SCHEDULER = "scheduler"
HERE = "localhost"
"""The launcher's host."""


@dataclass
class Plan:
    """Where the processes run, by their names: "rank 0", "server 0", "scheduler".

    Attributes:
        slots: the hosts that ranks may run on, in the order of their ranks, and how many each has room for.
        server_hosts: those that dedicated servers may run on.
        places: the host of each process. It changes when a process is started again on another host.
        local_ranks: the number of each rank on its host.
    """

    slots: dict[str, int]
    server_hosts: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=dict)
    local_ranks: dict[str, int] = field(default_factory=dict)

    @property
    def hosts(self) -> list[str]:
        """All hosts, each once: those of ranks first."""
        return list(dict.fromkeys([*self.slots, *self.server_hosts, *self.places.values()]))

    @property
    def first_host(self) -> str:
        """Where the scheduler runs, unless it runs with the launcher."""
        return (*self.server_hosts, *self.slots)[0]

    @property
    def root(self) -> str:
        """The host of the scheduler, or of rank 0 where that has the scheduler inside."""
        return self.places.get(SCHEDULER, self.places["rank 0"])

    def ranks_on(self, host: str) -> list[str]:
        """The names of the ranks that run on a host."""
        return [name for name, place in self.places.items() if place == host and name.startswith("rank")]

    def move(self, name: str, lost: set[str]) -> bool:
        """Find a place for a process that is lost, where its host is one of `lost`; returns False if there is none.

        A rank needs a free slot. A server may share its new host with others. The scheduler cannot move: the others
        look for it at its address.
        """
        if self.places[name] not in lost:
            return True
        if name.startswith("rank"):
            free = [host for host in self.slots if host not in lost and len(self.ranks_on(host)) < self.slots[host]]
        else:
            free = [] if name == SCHEDULER else [host for host in self.server_hosts if host not in lost]
        if not free:
            return False
        taken = {self.local_ranks.get(one) for one in self.ranks_on(free[0])}
        self.places[name] = free[0]
        self.local_ranks[name] = next(number for number in range(self.slots.get(free[0], 0) + 1) if number not in taken)
        return True


def make_plan(
    hosts: Sequence[Slots], ranks: int | None, server_hosts: Sequence[Slots], servers: int | None, *, goes_on: bool
) -> Plan:
    """Fill the slots of one host after the other with ranks, and spread the servers over theirs.

    Args:
        hosts: for the ranks.
        ranks: how many; None: as many as there are slots.
        server_hosts: for dedicated servers; none: servers are inside the ranks.
        servers: how many; None: as many as `server_hosts` have slots.
        goes_on: whether the job survives the loss of hosts. Its scheduler then runs with the launcher, with which the
            job ends anyway.

    Raises:
        InvalidArgumentError: there are fewer slots than ranks, or servers without a host for them.
    """
    plan = Plan({one.host: one.slots for one in hosts}, tuple(one.host for one in server_hosts))
    room = sum(plan.slots.values())
    if ranks is not None and ranks > room:
        shown = ",".join(f"{one.host}:{one.slots}" for one in hosts)
        raise InvalidArgumentError(
            f"-np {ranks} is more than the {room} slots of {shown}", "give hosts more slots, as in host1:8"
        )
    if servers is not None and not server_hosts:
        raise InvalidArgumentError("--servers needs hosts for them", "name those with --server-hosts")
    places = [host for host, slots in plan.slots.items() for _ in range(slots)]
    for rank, host in enumerate(places[:ranks]):
        plan.local_ranks[f"rank {rank}"] = len(plan.ranks_on(host))
        plan.places[f"rank {rank}"] = host
    chosen = [one.host for one in server_hosts for _ in range(one.slots)]
    for index in range(len(chosen) if servers is None else servers):
        plan.places[f"server {index}"] = chosen[index % len(chosen)]
    if goes_on or server_hosts:
        plan.places[SCHEDULER] = HERE if goes_on else plan.first_host
    return plan

# SPDX-License-Identifier: Apache-2.0
"""Chooses where the members of a job run, and makes the variables that tell them who they are.

The job reserves one bundle of resources per host with ranks, then one per dedicated server. An actor inherits the
environment of its raylet, which is that of `ray start`, or of the driver. Settings such as BPS_INTERFACE may reach the
actor that way; the identity that an outer job has given to that process must not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch.environment import IDENTITY
from bps_rdma.ray.errors import PlacementError

_NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node


@dataclass(frozen=True)
class JobShape:
    """The number of members of a job, and the resources of each.

    `strict`: each bundle on a node of its own. `own_scheduler`: the scheduler is a process of its own, with dedicated
    servers or without. `least`: the job goes on while that many ranks are left, for which it needs such a scheduler;
    0: it ends when a member is lost.
    """

    hosts: int = 1
    per_host: int = 1
    rank_resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    servers: int = 0
    server_resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    strict: bool = False
    own_scheduler: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.per_host < 1 or self.servers < 0:
            raise InvalidArgumentError(
                f"{self.hosts} hosts with {self.per_host} ranks each, and {self.servers} servers, are no job",
                "hosts and per_host must be at least 1, servers at least 0",
            )
        if not 0 <= self.least <= self.workers:
            raise InvalidArgumentError(
                f"min_workers is {self.least}, and the job has {self.workers} ranks",
                "give at least 1 and at most as many",
            )
        for name in ("rank_resources", "server_resources"):
            if not any(amount > 0 for amount in getattr(self, name).values()):
                raise InvalidArgumentError(
                    f"{name} is {dict(getattr(self, name))}", 'name at least one resource, as in {"CPU": 1}'
                )

    @property
    def has_scheduler(self) -> bool:
        """True if the scheduler is a process of its own; otherwise rank 0 hosts it."""
        return self.servers > 0 or ((self.own_scheduler or self.least > 0) and self.workers > 1)

    @property
    def workers(self) -> int:
        """Number of ranks."""
        return self.hosts * self.per_host

    def bundles(self) -> list[dict[str, float]]:
        """The resources to reserve: of each host, then of each server."""
        host = {name: amount * self.per_host for name, amount in self.rank_resources.items()}
        return [dict(host) for _ in range(self.hosts)] + [dict(self.server_resources) for _ in range(self.servers)]


@dataclass(frozen=True)
class MemberPlace:
    """The bundle of one member, and its node."""

    bundle: int
    node: str


@dataclass(frozen=True)
class RankPlace(MemberPlace):
    """The bundle and node of one rank, and its number there. Consecutive ranks share a node."""

    rank: int
    local_rank: int
    local_size: int
    node_rank: int


@dataclass(frozen=True)
class Placement:
    """A reservation; release() ends it."""

    group: Any
    ranks: list[RankPlace]
    servers: list[MemberPlace]

    def release(self) -> None:
        """Give the resources back; Ray ends what still runs there."""
        remove_placement_group(self.group)


def reserve(shape: JobShape, timeout: float, avoid: Collection[str] = ()) -> Placement:
    """Reserve room for a job.

    Args:
        shape: of the job.
        timeout: in seconds.
        avoid: nodes that get no member.

    Raises:
        PlacementError: there was no room in time.
    """
    bundles = shape.bundles()
    options: dict[str, Any] = {"strategy": "STRICT_SPREAD" if shape.strict else "SPREAD"}
    if avoid:
        options["bundle_label_selector"] = [{_NODE_LABEL: f"!in({','.join(sorted(avoid))})"}] * len(bundles)
    group = placement_group(bundles, **options)
    try:
        if not group.wait(timeout):
            raise PlacementError(*_no_room(shape, timeout, avoid))
        nodes = placement_group_table(group)["bundles_to_node_id"]
    except BaseException:
        remove_placement_group(group)
        raise
    return Placement(
        group, number_ranks([nodes[index] for index in range(shape.hosts)], shape.per_host),
        [MemberPlace(index, nodes[index]) for index in range(shape.hosts, len(bundles))],
    )  # fmt: skip


def number_ranks(nodes: list[str], per_host: int) -> list[RankPlace]:
    """Number the ranks so that those of a node are consecutive, also where a node got several bundles.

    Args:
        nodes: of each bundle.
        per_host: ranks in each bundle.
    """
    found: list[RankPlace] = []
    for node_rank, node in enumerate(dict.fromkeys(nodes)):
        mine = [bundle for bundle, its in enumerate(nodes) if its == node for _ in range(per_host)]
        found += [
            RankPlace(bundle, node, len(found) + local, local, len(mine), node_rank)
            for local, bundle in enumerate(mine)
        ]
    return found


def addresses() -> dict[str, str]:
    """The address of every node that Ray takes to be alive."""
    return {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


def _no_room(shape: JobShape, timeout: float, avoid: Collection[str]) -> tuple[str, str]:
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoid]
    bundles = shape.bundles()
    asked = f"{shape.hosts} times {_show(bundles[0])} for ranks"
    if shape.servers:
        asked += f" and {shape.servers} times {_show(bundles[-1])} for servers"
    offers = "; ".join(
        f"{node['NodeManagerAddress']} {_show({k: v for k, v in node['Resources'].items() if ':' not in k})}"
        for node in nodes
    )
    message = f"the cluster had no room for the job within {timeout:g} s: it asks for {asked}"
    message += f", {'each on a node of its own, ' if shape.strict else ''}and the nodes have {offers or 'nothing'}"
    if avoid:
        message += f" ({len(avoid)} nodes that do not answer are left out)"
    for bundle in bundles:
        if not any(all(node["Resources"].get(k, 0) >= v for k, v in bundle.items()) for node in nodes):
            return message, f"no node has {_show(bundle)}: ask for less, or add a node (`ray start --resources=...`)"
    if shape.strict and len(bundles) > len(nodes):
        return message, f"{len(bundles)} nodes are needed, and there are {len(nodes)}: leave out strict_spread"
    return message, f"free now: {_show(ray.available_resources())}; wait for other jobs, or ask for less"


def _show(resources: Mapping[str, float]) -> str:
    # Without memory, addresses, and what Ray calls the bundles of placement groups.
    known = {
        k: v
        for k, v in resources.items()
        if k not in ("memory", "object_store_memory") and ":" not in k and "_group_" not in k
    }
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in sorted(known.items())) + "}"


_PREFIXES = ("DMLC_", "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")


def identity(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that say which member of which job a process is."""
    return [name for name in environ if name in IDENTITY or name.startswith(_PREFIXES) or name == "NODE_RANK"]


def adopt(env: Mapping[str, str]) -> None:
    """Make this process the member that `env` describes, and nothing else."""
    for name in identity(os.environ):
        del os.environ[name]
    os.environ.update(env)
    if "BPS_MIN_WORKERS" in env:  # the driver starts another scheduler in the place of a lost one
        os.environ.setdefault("BPS_SCHEDULER_PATIENCE", "30")


@contextlib.contextmanager
def without_identity(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Hide who this process is taken to be, while it joins a job in which it is somebody else."""
    hidden = {name: environ.pop(name) for name in identity(environ)}
    try:
        yield
    finally:
        environ.update(hidden)


@dataclass(frozen=True)
class Address:
    """A free port of a host."""

    host: str
    port: int


@dataclass(frozen=True)
class Identity:
    """One attempt of a job. Each has a name and a secret of its own, so that no member of an earlier one can join.

    Args:
        workers: number of ranks.
        servers: number of dedicated servers; 0: servers inside the ranks.
        master: for torch.distributed.
        scheduler: of the scheduler; None: inside rank 0.
        attempt: from 0.
        least: the job goes on while that many ranks are left; 0: it ends when a member is lost.
    """

    workers: int
    servers: int
    master: Address
    scheduler: Address | None
    attempt: int
    least: int = 0
    name: str = field(default_factory=lambda: f"ray-{secrets.token_hex(8)}")
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def rank(self, place: RankPlace) -> dict[str, str]:
        """The variables of a rank, which are torchrun's and ours."""
        env = self._common() | {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "GROUP_RANK": str(place.node_rank),
            "MASTER_ADDR": self.master.host,
            "MASTER_PORT": str(self.master.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
        }
        if self.scheduler is not None and not self.servers:
            env["BPS_ROLE"] = "joint"
        return env

    def server(self) -> dict[str, str]:
        """The variables of a server and of the scheduler."""
        return self._common() | {"BPS_NUM_WORKERS": str(self.workers)}

    def _common(self) -> dict[str, str]:
        env = {"BPS_JOB_ID": self.name, "BPS_SECRET": self.secret}
        if self.scheduler is not None:
            env |= {
                "BPS_NUM_SERVERS": str(self.servers or self.workers),
                "BPS_ROOT_URI": self.scheduler.host,
                "BPS_ROOT_PORT": str(self.scheduler.port),
            }
        if self.least:
            env["BPS_MIN_WORKERS"] = str(self.least)
        return env

# SPDX-License-Identifier: Apache-2.0
"""Where the members of a job run: one bundle of resources per host with ranks, then one per dedicated server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.ray.errors import PlacementError

_NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node


@dataclass(frozen=True)
class Shape:
    """How many members a job has, and what each of them takes.

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
        """Whether the scheduler is a process of its own; otherwise rank 0 hosts it."""
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
class Place:
    """Of one member: the bundle that it lies in, and its node."""

    bundle: int
    node: str


@dataclass(frozen=True)
class RankPlace(Place):
    """Of one rank, with its place among the ranks of its node. Consecutive ranks share a node."""

    rank: int
    local_rank: int
    local_size: int
    node_rank: int


@dataclass(frozen=True)
class Placement:
    """A reservation; release() ends it."""

    group: Any
    ranks: list[RankPlace]
    servers: list[Place]

    def release(self) -> None:
        """Give the resources back; Ray ends what still runs there."""
        remove_placement_group(self.group)


def reserve(shape: Shape, timeout: float, avoid: Collection[str] = ()) -> Placement:
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
        [Place(index, nodes[index]) for index in range(shape.hosts, len(bundles))],
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


def _no_room(shape: Shape, timeout: float, avoid: Collection[str]) -> tuple[str, str]:
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

# SPDX-License-Identifier: Apache-2.0
"""How the members of a collective group find each other: by Ray's key-value store, which only its cluster reaches.

Each member writes what it is. Rank 0 reads all of it and answers with all of it, and with an address and a secret for
those that are in no job yet. An answer that does not have this member's own entry is of an earlier group.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.experimental import internal_kv

import bps_rdma
from bps_rdma import job
from bps_rdma.errors import DeadlineError, InvalidArgumentError
from bps_rdma.ray.environment import without_identity
from bps_rdma.settings import config_with

T = TypeVar("T")
_LOOK_S = 0.02
_READ_S = 10.0  # a member that has not read the answer by then is dead


@dataclass(frozen=True)
class Meeting:
    """What came of it: the group, the rank in the job of each member, and whether they joined that job only now."""

    group: bps_rdma.Group
    ranks: list[int]
    joined: bool


def meet(group: str, size: int, rank: int) -> Meeting:
    """Find the other members, and join a job with them unless all are in one.

    Raises:
        InvalidArgumentError: some members are in a job and others are not, or in another one.
        DeadlineError: members did not come within BPS_JOIN_TIMEOUT; names them.
    """
    limit = config_with({}).seconds("BPS_JOIN_TIMEOUT")
    mine = {"token": secrets.token_hex(8), "node": ray.get_runtime_context().get_node_id(), **_membership()}
    _put(f"{group}/{rank}", mine)
    try:
        found = _answer(group, size, limit) if rank == 0 else _answered(group, rank, mine, limit)
    finally:
        internal_kv._internal_kv_del(_key(f"{group}/{rank}"))
    try:
        ranks, joined = _ranks(group, rank, found)
        return Meeting(bps_rdma.new_group(ranks, name=f"ray.{group}"), ranks, joined)
    finally:
        if rank == 0:
            _forget_answer(group, size)


def _forget_answer(group: str, size: int) -> None:
    """Deletes what rank 0 has answered, which holds a secret, once all have read it: then they delete their own."""
    deadline = time.monotonic() + _READ_S
    while any(_get(f"{group}/{rank}") for rank in range(1, size)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    internal_kv._internal_kv_del(_key(f"{group}/all"))


def _membership() -> dict[str, Any]:
    if not bps_rdma.is_initialized():
        return {"job": "", "rank": -1}
    return {"job": job.current().config.text("BPS_JOB_ID"), "rank": bps_rdma.rank()}


def _answer(group: str, size: int, limit: float) -> dict[str, Any]:
    def missing() -> str:
        absent = ", ".join(str(rank) for rank in range(size) if _get(f"{group}/{rank}") is None)
        return f"ranks {absent} of the collective group {group!r} did not come"

    def all_members() -> list[Any] | None:
        entries = [_get(f"{group}/{rank}") for rank in range(size)]
        return None if None in entries else entries

    found = {
        "members": _await(all_members, limit, missing),
        "host": ray.util.get_node_ip_address(),
        "job": f"ray-{secrets.token_hex(8)}",
        "secret": secrets.token_hex(32),
    }
    _put(f"{group}/all", found)
    return found


def _answered(group: str, rank: int, mine: dict[str, Any], limit: float) -> dict[str, Any]:
    def answer() -> dict[str, Any] | None:
        found = _get(f"{group}/all")
        return found if found and mine in found["members"][rank : rank + 1] else None

    return _await(answer, limit, lambda: f"rank 0 of the collective group {group!r} did not answer rank {rank}")


def _ranks(group: str, rank: int, found: dict[str, Any]) -> tuple[list[int], bool]:
    members = found["members"]
    jobs = {member["job"] for member in members}
    if len(jobs) > 1:
        said = ", ".join(f"rank {i} {member['job'] or 'in none'}" for i, member in enumerate(members))
        raise InvalidArgumentError(
            f"members of the collective group {group!r} are in different jobs: {said}",
            "make the largest group first; later ones consist of its members",
        )
    if jobs != {""}:
        return [member["rank"] for member in members], False
    here = [i for i, member in enumerate(members) if member["node"] == members[rank]["node"]]
    with without_identity(os.environ):
        bps_rdma.init(
            rank=rank, world_size=len(members), local_rank=here.index(rank), local_size=len(here),
            root_uri=found["host"], job_id=found["job"], secret=found["secret"],
        )  # fmt: skip
    return list(range(len(members))), True


def _await(look: Callable[[], T | None], limit: float, missing: Callable[[], str]) -> T:
    deadline = time.monotonic() + limit
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{missing()} within {limit:g} s",
                "every member calls init_collective_group(); or raise BPS_JOIN_TIMEOUT",
            )
        time.sleep(_LOOK_S)
    return found


def _key(name: str) -> bytes:
    return f"bps_rdma/collective/{name}".encode()


def _put(name: str, value: dict[str, Any]) -> None:
    internal_kv._internal_kv_put(_key(name), json.dumps(value).encode(), overwrite=True)


def _get(name: str) -> dict[str, Any] | None:
    value = internal_kv._internal_kv_get(_key(name))
    return None if value is None else json.loads(value)

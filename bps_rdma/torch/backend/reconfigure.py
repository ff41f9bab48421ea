# SPDX-License-Identifier: Apache-2.0
"""A default group whose members change: torch's interface for fault tolerance (torch 2.14 and later).

init_process_group("bps", enable_reconfigure=True) makes it, without members. Each reconfigure() leaves the job of
before, if there was one, without waiting for anybody, and joins a new job with the given peers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

import torch
import torch.distributed as dist

import bps_rdma
from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError, NotInitializedError
from bps_rdma.hosts import host_identity
from bps_rdma.settings import config_with
from bps_rdma.torch import membership
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.pending import Pace
from bps_rdma.torch.backend.process_group import BpsProcessGroup
from bps_rdma.torch.backend.recurring import Recurring
from bps_rdma.torch.backend.work import done

c10d: Any = dist
_GREETING_BYTES = 512  # a rank that joins tells its host, and how to reach it


class _NoMembers:
    """Stands for the collectives of a group before it has members."""

    def __getattr__(self, name: str) -> Any:
        raise NotInitializedError(
            "the process group has no members yet", "call torch.distributed._reconfigure() on all of them first"
        )


class ReconfigurableGroup(BpsProcessGroup):
    """The group that init_process_group("bps", enable_reconfigure=True) returns; see docs/torch-backend.md."""

    def __init__(self, options: Any) -> None:
        """Makes a group without members.

        Args:
            options: torch's DistributedBackendOptions.

        Raises:
            InvalidArgumentError: a job is running, or is to have dedicated servers.
        """
        if bps_rdma.is_initialized():
            raise InvalidArgumentError(
                "bps_rdma has joined a job already, whose members cannot be changed from here",
                "call bps_rdma.shutdown() before init_process_group(enable_reconfigure=True)",
            )
        if config_with({}).text("BPS_NUM_SERVERS"):
            raise InvalidArgumentError(
                "a group with enable_reconfigure has its servers inside the workers", "unset BPS_NUM_SERVERS"
            )
        super().__init__(options, _NoMembers(), leaves=True, cuda="")  # type: ignore[arg-type]
        self._place: tuple[int, int] = (options.group_rank, options.group_size)
        self._gloo = c10d.ProcessGroupGloo(
            c10d.PrefixStore("gloo/", options.store),
            options.group_rank,
            options.group_size,
            timeout=options.timeout,
            enable_reconfigure=True,
        )
        self._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)

    def rank(self) -> int:
        """The rank of this process among the members."""
        return self._place[0]

    def size(self) -> int:
        """The number of members."""
        return self._place[1]

    @property
    def supports_reconfigure(self) -> bool:
        """True."""
        return True

    def get_reconfigure_handle(self) -> str:
        """The handle by which the other members find this process; for reconfigure()."""
        return str(self._gloo.get_reconfigure_handle())

    def reconfigure(self, opts: Any) -> Any:
        """Leaves the members of before, and joins those of `opts`; returns when all of these have come.

        Args:
            opts: torch's ReconfigureOptions: a number that was not used before, the handles of all members (a list
                gives them their ranks), and optionally how long to wait for them.

        Returns:
            A Work that is complete.

        Raises:
            RuntimeError: of gloo: the number has been used, or a member did not come. The members are then as before.
            Errors of bps_rdma.init(): the group then has no members.
        """
        self._gloo.reconfigure(opts).wait()
        self.abort_members()
        rank, size = self._gloo.rank(), self._gloo.size()
        settings = _agree(self._gloo, self._store, rank, size)
        if opts.timeout is not None:
            settings["join_timeout"] = opts.timeout.total_seconds()
        if config_with({}).source("BPS_TIMEOUT") == "default":
            settings["timeout"] = self._seconds
        job.join(settings, resumes=False)
        self._place = (rank, size)
        self._collectives = Collectives(rank, range(size), None, "torch")
        membership.set_origin(self)
        return done()

    def abort_members(self) -> None:
        """Leaves the members without waiting for them: they may be dead."""
        self._collectives = _NoMembers()  # type: ignore[assignment]
        self._pace = Pace()
        self._recurring = Recurring(self._pace)
        bps_rdma.shutdown(timeout=0)

    def abort(self) -> None:
        """Ends what is in progress, in all threads, and leaves the members; reconfigure() may follow."""
        self.abort_members()
        super().abort()


def _agree(gloo: Any, store: Any, rank: int, size: int) -> dict[str, object]:
    """Settings for a job of the members of a gloo group: rank 0 names the job, and hosts the scheduler."""
    host = hashlib.sha256(host_identity().encode()).hexdigest()[:32]
    greeting = json.dumps(
        {"host": host, "job": secrets.token_hex(16), "address": membership.own_address(store)}
    ).encode()
    mine = torch.frombuffer(bytearray(greeting.ljust(_GREETING_BYTES)), dtype=torch.uint8)
    greetings = [torch.empty_like(mine) for _ in range(size)]
    gloo.allgather([greetings], [mine]).wait()
    told = [json.loads(bytes(each.tolist())) for each in greetings]
    hosts = [str(each["host"]) for each in told]
    return {
        "rank": rank,
        "world_size": size,
        "job_id": str(told[0]["job"]),
        "root_uri": "127.0.0.1" if len(set(hosts)) == 1 else str(told[0]["address"]),
        "local_rank": hosts[:rank].count(host),
        "local_size": hosts.count(host),
    }

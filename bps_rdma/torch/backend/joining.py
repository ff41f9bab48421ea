# SPDX-License-Identifier: Apache-2.0
"""Creates process groups: the default one joins the job of bps_rdma, the others are groups of its workers."""

from __future__ import annotations

from typing import Any

import bps_rdma
from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError, NotInitializedError
from bps_rdma.settings import config_with
from bps_rdma.torch import membership
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.counted import counted_groups
from bps_rdma.torch.backend.process_group import BpsProcessGroup
from bps_rdma.torch.backend.reconfigure import ReconfigurableGroup


def create(options: Any, _: object = None) -> BpsProcessGroup:
    """Creates a group. torch.distributed calls this on the members of the group only.

    Args:
        options: torch's DistributedBackendOptions.
        _: `pg_options`, which belong to other backends.

    Raises:
        InvalidArgumentError: the running job has other ranks than the default group.
        NotInitializedError: the default group has another backend, and no job is running.
        DeadlineError, ...: as bps_rdma.init() and bps_rdma.new_group().
    """
    if options.global_ranks_in_group:
        if not bps_rdma.is_initialized():
            raise NotInitializedError(
                "the default group has another backend, and bps_rdma is not initialised",
                "call bps_rdma.torch.init() on all ranks before new_group()",
            )
        ranks, counted = list(options.global_ranks_in_group), counted_groups()
        collectives = Collectives(options.group_rank, ranks, counted.make(ranks), counted.prefix)
        return BpsProcessGroup(options, collectives, leaves=False)
    if getattr(options, "enable_reconfigure", False):  # torch 2.14 and later
        return ReconfigurableGroup(options)
    return _create_default(options)


def _create_default(options: Any) -> BpsProcessGroup:
    starts = not bps_rdma.is_initialized()
    if starts:
        _join(options)
    rank, size = options.group_rank, options.group_size
    if (bps_rdma.rank(), bps_rdma.size()) != (rank, size):
        raise InvalidArgumentError(
            f"this is worker {bps_rdma.rank()} of {bps_rdma.size()}, but rank {rank} of {size} in torch.distributed",
            "start both with the same RANK and WORLD_SIZE, or call bps_rdma.shutdown() first",
        )
    counted = counted_groups()
    try:
        collectives = Collectives(rank, range(size), None, counted.next_prefix)
        made = BpsProcessGroup(options, collectives, leaves=starts)
        bps_rdma.barrier()  # or a rank that destroys the group now would end the store that others still read
        counted.made += 1
    except BaseException:
        if starts:
            bps_rdma.shutdown()
        raise
    if starts or membership.has_origin():
        membership.set_origin(made)
    return made


def _join(options: Any) -> None:
    settings: dict[str, object] = {}
    if config_with({}).source("BPS_TIMEOUT") == "default":
        settings["timeout"] = options.timeout.total_seconds()
    if config_with({}).text("BPS_NUM_SERVERS"):
        job.join(settings, resumes=False)
    else:
        membership.init_from_store(options.store, options.group_rank, options.group_size, settings)

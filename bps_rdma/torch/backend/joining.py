"""Making a process group: the default one joins the job of bps_rdma, the others are groups of its workers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import bps_rdma
from bps_rdma.errors import InvalidArgumentError, NotInitializedError
from bps_rdma.job import config_with
from bps_rdma.torch import start
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.process_group import BpsProcessGroup

_lives = itertools.count()  # of default groups; a job that outlives one must not see its names again
_life = 0


@dataclass(frozen=True)
class Options:
    """What new_group(backend="bps", pg_options=Options(...)) can be told.

    Attributes:
        stage_gpu: reductions and all_gather_single of tensors on a GPU go over bps_rdma too, through pinned memory;
            else they are NCCL's.
    """

    stage_gpu: bool = False


def create(options: Any, more: object = None) -> BpsProcessGroup:
    """What torch.distributed calls to make a group, on its members only.

    Args:
        options: torch's DistributedBackendOptions.
        more: Options, or those of another backend, which are ignored.

    Raises:
        InvalidArgumentError: the job that runs has other ranks than the default group.
        NotInitializedError: a group beside a default group of another backend, and no job runs.
        DeadlineError, ...: as bps_rdma.init() and bps_rdma.new_group().
    """
    if options.global_ranks_in_group:
        if not bps_rdma.is_initialized():
            raise NotInitializedError(
                "the default group has another backend, and bps_rdma does not run",
                "call bps_rdma.torch.init() on all ranks before new_group()",
            )
        ranks = list(options.global_ranks_in_group)
        group = bps_rdma.new_group(ranks, name=f"torch {_life}.{options.group_id}")
        collectives = Collectives(options.group_rank, ranks, group, f"torch {_life}")
        stages = isinstance(more, Options) and more.stage_gpu
        return BpsProcessGroup(options, collectives, leaves=False, stages=stages)
    return _create_default(options)


def _create_default(options: Any) -> BpsProcessGroup:
    global _life
    starts = not bps_rdma.is_initialized()
    if starts:
        _join(options)
    rank, size = options.group_rank, options.group_size
    if (bps_rdma.rank(), bps_rdma.size()) != (rank, size):
        raise InvalidArgumentError(
            f"this is worker {bps_rdma.rank()} of {bps_rdma.size()}, but rank {rank} of {size} in torch.distributed",
            "start both with the same RANK and WORLD_SIZE, or call bps_rdma.shutdown() first",
        )
    _life = next(_lives)
    try:
        made = BpsProcessGroup(options, Collectives(rank, range(size), None, f"torch {_life}"), leaves=starts)
    except BaseException:
        if starts:
            bps_rdma.shutdown()
        raise
    if starts or start.follows():
        start.follow(made)
    return made


def _join(options: Any) -> None:
    settings: dict[str, object] = {}
    if config_with({}).source("BPS_TIMEOUT") == "default":
        settings["timeout"] = options.timeout.total_seconds()
    if config_with({}).text("BPS_NUM_SERVERS"):
        bps_rdma.init(**settings)
    else:
        start.start_over(options.store, options.group_rank, options.group_size, settings)

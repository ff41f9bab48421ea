# SPDX-License-Identifier: Apache-2.0
"""Creates process groups: the default one joins the job of bps_rdma, the others are groups of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import bps_rdma
from bps_rdma import _core, job
from bps_rdma.errors import InvalidArgumentError, NotInitializedError
from bps_rdma.settings import config_with
from bps_rdma.torch import membership
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.counted import counted_groups
from bps_rdma.torch.backend.process_group import BpsProcessGroup
from bps_rdma.torch.backend.reconfigure import ReconfigurableGroup


@dataclass(frozen=True)
class Options:
    """Options of init_process_group("bps", pg_options=Options(...)), and of new_group().

    Attributes:
        stage_gpu: whether collectives and messages of CUDA tensors use bps_rdma, through memory of the host, instead of
            NCCL.
    """

    stage_gpu: bool = False


def create(options: Any, more: object = None) -> BpsProcessGroup:
    """Creates a group. torch.distributed calls this on the members of the group only.

    Args:
        options: torch's DistributedBackendOptions.
        more: Options, or those of another backend, which are ignored.

    Raises:
        InvalidArgumentError: the running job has other ranks than the default group.
        NotInitializedError: the default group has another backend, and no job is running.
        DeadlineError, ...: as bps_rdma.init() and bps_rdma.new_group().
    """
    stages = isinstance(more, Options) and more.stage_gpu
    if options.global_ranks_in_group:
        if not bps_rdma.is_initialized():
            raise NotInitializedError(
                "the default group has another backend, and bps_rdma is not initialised",
                "call bps_rdma.torch.init() on all ranks before new_group()",
            )
        ranks, counted = list(options.global_ranks_in_group), counted_groups()
        collectives = Collectives(options.group_rank, ranks, counted.make(ranks), counted.prefix)
        return BpsProcessGroup(options, collectives, leaves=False, stages=stages)
    if getattr(options, "enable_reconfigure", False):  # torch 2.14 and later
        return ReconfigurableGroup(options)
    made = _create_default(options, stages)
    if options.group_rank == 0 and torch.cuda.is_available():
        _tell_who_takes_cuda(more)
    return made


def _tell_who_takes_cuda(more: object) -> None:
    """Says which library sums CUDA tensors: a warning where nobody has chosen it."""
    instead = "pass pg_options=bps_rdma.torch.backend.Options(stage_gpu=True) to sum them with bps_rdma"
    if isinstance(more, Options) and more.stage_gpu:
        _core.log_info("collectives of CUDA tensors go through bps_rdma, as stage_gpu=True asks")
    elif isinstance(more, Options):
        _core.log_info(f"collectives of CUDA tensors do not go through bps_rdma, as stage_gpu=False asks; {instead}")
    else:
        who = "go to NCCL, not to bps_rdma" if dist.is_nccl_available() else "are refused: this torch has no NCCL"
        _core.log_warning(
            f"collectives of CUDA tensors {who}; {instead}, or Options(stage_gpu=False) to hide this line"
        )


def _create_default(options: Any, stages: bool) -> BpsProcessGroup:
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
        made = BpsProcessGroup(options, collectives, leaves=starts, stages=stages)
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

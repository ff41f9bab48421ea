# SPDX-License-Identifier: Apache-2.0
"""Gives Megatron's groups of tensor and pipeline parallelism the torch backend bps, each with the ranks that it has.

Megatron keeps its groups in variables of a module, which models read when they are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bps_rdma.torch import membership
from bps_rdma.torch.backend import Options

TENSOR = (
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_PARALLEL_GROUP",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",  # tokens travel in it, to experts and back
)
PIPELINE = (
    "_PIPELINE_MODEL_PARALLEL_GROUP",  # activations from stage to stage
    "_EMBEDDING_GROUP",  # gradients of weights that the first and the last stage share
    "_POSITION_EMBEDDING_GROUP",
)


def replace_groups(names: Sequence[str]) -> None:
    """Replaces the groups of these names; every rank calls it, before models are built."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    membership.init()
    own: dict[str, tuple[int, ...]] = {}
    for name in names:
        stock = getattr(parallel_state, name, None)
        if isinstance(stock, dist.ProcessGroup) and stock.size() > 1:
            own[name] = tuple(dist.get_process_group_ranks(stock))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    # Every rank makes all groups. Where only members do, torch names a group by how many groups a rank has already,
    # which is not the same for all stages.
    for name in names:
        for ranks in sorted({each[name] for each in of_ranks if name in each}):
            made = dist.new_group(
                list(ranks), backend="bps", pg_options=Options(stage_gpu=True), group_desc=f"BPS{name}"
            )
            if ranks == own.get(name):
                setattr(parallel_state, name, made)

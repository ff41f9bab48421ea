# SPDX-License-Identifier: Apache-2.0
"""Gives Megatron's groups of tensor and pipeline parallelism the torch backend bps, each with the ranks that it has.

Megatron keeps its groups in variables of a module, which models read when they are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch import membership

_EXPERTS = "_EXPERT_TENSOR_PARALLEL_GROUP"
_TOKENS = "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"  # in which some dispatchers send tokens to experts and back
GROUPS = {  # by flag
    "--use-bps-tp": ("_TENSOR_MODEL_PARALLEL_GROUP", _EXPERTS, _TOKENS),
    "--use-bps-pp": (
        "_PIPELINE_MODEL_PARALLEL_GROUP",  # activations from stage to stage
        "_EMBEDDING_GROUP",  # gradients of weights that the first and the last stage share
        "_POSITION_EMBEDDING_GROUP",
    ),
}


def replace_groups(flags: Sequence[str], timeout: timedelta | None = None) -> None:
    """Replaces the groups of these flags; every rank calls it with the same ones, before models are built.

    Args:
        flags: keys of GROUPS; none: only checks that the other ranks have none either.
        timeout: of the new groups; default: torch's.

    Raises:
        InvalidArgumentError: ranks have different flags.
        DeadlineError: not all ranks came.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    membership.init()
    names = [name for flag in flags for name in GROUPS[flag]]
    own = {name: ranks for name in names if len(ranks := _ranks_of(name)) > 1}
    if _EXPERTS not in own:
        own.pop(_TOKENS, None)  # without tensor parallelism of experts it has nothing to do with this flag
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (tuple(flags), own))
    for rank, (others, _) in enumerate(of_ranks):
        if others != of_ranks[0][0]:
            raise InvalidArgumentError(
                f"rank {rank} has {_named(others)}, but rank 0 has {_named(of_ranks[0][0])}",
                "start all ranks with the same flags, and call enable() on all of them with the same arguments",
            )
    # Every rank makes all groups. Where only members do, torch names a group by how many groups a rank has already,
    # which is not the same for all stages.
    for name in names:
        for ranks in sorted({each[name] for _, each in of_ranks if name in each}):
            made = dist.new_group(list(ranks), timeout=timeout, backend="bps", group_desc=f"BPS{name}")
            if ranks == own.get(name):
                setattr(parallel_state, name, made)


def is_replaced(flag: str) -> bool:
    """Whether this rank has a group that the flag has replaced."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = [getattr(parallel_state, name, None) for name in GROUPS[flag]]
    return any(isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "bps" for group in groups)


def _ranks_of(name: str) -> tuple[int, ...]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    stock = getattr(parallel_state, name, None)
    return tuple(dist.get_process_group_ranks(stock)) if isinstance(stock, dist.ProcessGroup) else ()


def _named(flags: Sequence[str]) -> str:
    return " and ".join(flags) or f"none of {', '.join(GROUPS)}"

# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks train the same values: gradients of different models have no meaningful mean."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bps_rdma import Group, job
from bps_rdma.errors import MismatchError
from bps_rdma.torch.check_alike import check_alike, tensor_line

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the size of an element


def check_same_values(named: Iterable[tuple[str, torch.nn.Parameter]], name: str, group: Group | None) -> None:
    """Compares the parameters of all ranks, by a sum of their bits. Costs one small all_gather; all ranks call it.

    In a job that goes on without lost ranks (BPS_MIN_WORKERS) this has no effect: new ranks get their values later. The
    names of buckets then tell of shapes that differ; see Sent.marks_shapes.

    Raises:
        MismatchError: names the first parameter that differs.
    """
    if job.current().may_lose_members:
        return
    pairs = list(named)
    sums = [_sum_of_bits(parameter) for _, parameter in pairs]
    lines = [f"{tensor_line(*pair)} = {int(total):x}" for pair, total in zip(pairs, sums, strict=True)]
    try:
        check_alike(lines, name, group)
    except MismatchError as error:
        raise MismatchError(
            f"values of parameters differ between ranks (sums of their bits): {error.message}",
            "call broadcast_parameters(model.state_dict(), root_rank=0) on all ranks before the first step",
        ) from None


def _sum_of_bits(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().reshape(-1).contiguous()
    return flat.view(_WORDS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64)

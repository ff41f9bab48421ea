# SPDX-License-Identifier: Apache-2.0
"""Training on stock Megatron and over push/pull, and what both must have in common."""

import os
from dataclasses import replace
from typing import Any

import cpu
import gpt
import pytest
import torch.distributed as dist
from gpt import Setup

CONFIGURATIONS = {
    "plain": Setup(),
    "one microbatch": Setup(microbatches=1),
    "average": Setup(average=True),
    "overlap": Setup(overlap=True),
    "overlap, average, NaN check": Setup(overlap=True, average=True, check_nan=True),
    "per token": Setup(per_token=True),
    "distributed optimizer": Setup(distributed_optimizer=True),
    "distributed optimizer, average": Setup(distributed_optimizer=True, average=True),
    "distributed optimizer, overlap": Setup(distributed_optimizer=True, overlap=True),
    "distributed optimizer, both overlaps": Setup(distributed_optimizer=True, overlap=True, overlap_gather=True),
    "bf16": Setup(bf16=True),
    "bf16, overlap": Setup(bf16=True, overlap=True),
    "bf16, fp32 gradients, both overlaps": Setup(
        bf16=True, fp32_gradients=True, distributed_optimizer=True, overlap=True, overlap_gather=True
    ),
    "fp16": Setup(fp16=True),
    "fp16, both overlaps": Setup(fp16=True, distributed_optimizer=True, overlap=True, overlap_gather=True),
    "experts": Setup(experts=4, ep=2),
    "experts, overlap": Setup(experts=4, ep=2, overlap=True),
    "experts, distributed optimizer": Setup(experts=4, distributed_optimizer=True, overlap=True),
}
# A difference shows in the weights of the next step. `ci/test --all` takes as many steps as the example.
TWO_RANKS = {
    name: setup if os.environ.get("BPS_TEST_ALL") else replace(setup, steps=8) for name, setup in CONFIGURATIONS.items()
}
BOTH_OVERLAPS = {"distributed_optimizer": True, "overlap": True, "overlap_gather": True}


def stock_and_ours(bps: Any, setup: Setup, tensors: bool = False) -> dict[str, Any]:
    """Trains twice in the same processes, without and with the adapter."""
    from bps_rdma import megatron
    from bps_rdma.megatron.communicator import counts

    cpu.install()
    dist.init_process_group("gloo")
    stock = gpt.train(setup)
    assert sum(counts.values()) == 0, "stock Megatron went through us"
    with megatron.enabled(use_dpu_tp_reduce=tensors) as on:
        assert on
        ours = gpt.train(setup)
    return {"same": stock == ours, "stock": stock, "ours": ours, "counts": dict(counts), **bps.metrics()["total"]}


def check(found: list[dict[str, Any]], setup: Setup) -> None:
    # The sum of two numbers is the same in any order. Of more, stock adds in another order than servers do.
    exact = len(found) <= 2 * setup.tp * setup.pp
    for rank, one in enumerate(found):
        stock, ours = one["stock"], one["ours"]
        assert one["same"] or not exact, f"rank {rank}: {stock} {ours}"
        assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
        assert ours.norms == pytest.approx(stock.norms, rel=1e-5)
        assert ours.scale == stock.scale
        groups = one["ours"].bucket_groups
        kind = "reduce_scatter" if setup.distributed_optimizer else "all_reduce"
        assert one["counts"][kind] >= setup.steps * groups
        assert groups > 0 or setup.ep > 1
        if setup.distributed_optimizer:
            assert one["counts"]["all_gather"] >= setup.steps
    assert any(one["stock"].losses for one in found)
    if setup.fp16:
        assert -1.0 in found[0]["ours"].norms, "no step was skipped"
        assert found[0]["ours"].norms[-1] > 0, "all steps were skipped"
    if setup.overlap and setup.pp == setup.ep == 1:
        assert max(one["ours"].bucket_groups for one in found) > 1, "there was nothing to overlap"

# SPDX-License-Identifier: Apache-2.0
"""Megatron on a GPU that two ranks share, staged, against stock on gloo. Collected only where there is a GPU."""

from __future__ import annotations

from typing import Any

import cluster
import gpt
import pytest
import torch
import torch.distributed as dist
from gpt import Setup
from test_parity import BOTH_OVERLAPS


def stock_and_staged(bps: Any, setup: Setup) -> dict[str, Any]:
    from bps_rdma import megatron
    from bps_rdma.megatron.communicator import counts

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    stock = gpt.train(setup)
    with megatron.enabled():
        ours = gpt.train(setup)
    figures = {"stock": stock, "ours": ours, "counts": dict(counts), **bps.metrics()["total"]}
    dist.destroy_process_group()
    bps.shutdown()
    return figures


@pytest.mark.parametrize(
    "setup", [Setup(), Setup(overlap=True), Setup(**BOTH_OVERLAPS)], ids=["plain", "overlap", "both overlaps"]
)
def test_training_on_a_gpu(setup):
    for one in cluster.run(stock_and_staged, setup, workers=2, init=False):
        # Not bit for bit: kernels of a GPU add up in any order.
        assert one["ours"].losses == pytest.approx(one["stock"].losses, rel=1e-4)
        assert one["ours"].norms == pytest.approx(one["stock"].norms, rel=1e-3)
        assert sum(one["counts"].values()) >= setup.steps
        assert one["copied_bytes"] == 0, "chunks are copied by the GPU alone"

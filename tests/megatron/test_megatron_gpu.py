# SPDX-License-Identifier: Apache-2.0
"""Megatron on a GPU that two ranks share, staged, against stock Megatron on the CPU.

Collected only where there is a GPU. Stock Megatron cannot be the measure there: NCCL refuses ranks that share a GPU,
and gloo has no coalesced all-reduce of CUDA tensors.
"""

from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from parity import BOTH_OVERLAPS


def stock_on_cpu(bps: Any, options: dict[str, Any]) -> Any:
    import cpu
    import gpt

    cpu.install()
    dist.init_process_group("gloo")
    stock = gpt.train(gpt.Setup(**options))
    return stock.losses, stock.norms


def staged(bps: Any, options: dict[str, Any]) -> dict[str, Any]:
    import gpt

    from bps_rdma import megatron
    from bps_rdma.megatron.communicator import counts

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    with megatron.enabled():
        ours = gpt.train(gpt.Setup(**options))
    return {"ours": (ours.losses, ours.norms), "counts": dict(counts), **bps.metrics()["total"]}


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "overlap": {"overlap": True}, "both overlaps": BOTH_OVERLAPS}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_training_on_a_gpu(options):
    measure = harness.run(stock_on_cpu, options, workers=2, init=False)
    for (losses, norms), one in zip(measure, harness.run(staged, options, workers=2, init=False), strict=True):
        # Not bit for bit: kernels of a GPU round differently.
        assert one["ours"][0] == pytest.approx(losses, rel=1e-3)
        assert one["ours"][1] == pytest.approx(norms, rel=1e-2)
        assert sum(one["counts"].values()) >= len(norms)
        assert one["copied_bytes"] == 0, "chunks are copied by the GPU alone"

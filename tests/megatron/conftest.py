"""Tests of the Megatron adapter. Ranks are forked from a process that has imported megatron-core."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded: here, and in the process that ranks are forked from

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'bps_rdma[megatron]'")
# What the tests train is the example.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron"))

import cluster

cluster.PRELOAD.extend([
    "torch", "torch.distributed", "torch._dynamo", "bps_rdma.torch", "bps_rdma.megatron", "megatron.core",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt.gpt_model", "megatron.core.models.gpt.gpt_layer_specs", "cpu", "gpt",
])  # fmt: skip

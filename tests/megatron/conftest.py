# SPDX-License-Identifier: Apache-2.0
"""Tests of the Megatron adapter. Ranks are forked from a process that has imported megatron-core."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded: here, and in the process that ranks are forked from

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megatron-core>=0.14'")
# What the tests train is the example.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron"))
sys.path.append(str(Path(__file__).parents[1] / "torch"))  # the simulated device

import cpu  # noqa: F401  first: megatron-core from 0.18 on needs it to be imported on Python before 3.12
import harness
import megatron.core
import torch

harness.PRELOAD.extend(["torch", "torch.distributed", "torch._dynamo", "bps_rdma.torch", "bps_rdma.megatron"])
# Wheels before 0.17 have no megatron.training.
collect_ignore = [] if importlib.util.find_spec("megatron.training") else ["test_training.py", "test_pretrain.py"]
# Importing Megatron may use CUDA, which a process that is forked afterwards cannot use any more: with a GPU each rank
# imports it for itself.
if not torch.cuda.is_available():
    collect_ignore.append("test_megatron_gpu.py")
    harness.PRELOAD.extend([
        "cpu", "megatron.core", "megatron.core.distributed", "megatron.core.optimizer",
        "megatron.core.pipeline_parallel", "megatron.core.models.gpt.gpt_model",
        "megatron.core.models.gpt.gpt_layer_specs", "gpt",
    ])  # fmt: skip
    if "test_training.py" not in collect_ignore:
        harness.PRELOAD.append("megatron.training.arguments")


def pytest_report_header():
    gpu = "a GPU" if torch.cuda.is_available() else "no GPU: test_megatron_gpu.py is left out"
    return f"megatron-core {megatron.core.__version__} from {Path(megatron.core.__file__).parents[2]}, {gpu}"

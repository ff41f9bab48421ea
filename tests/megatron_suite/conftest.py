# SPDX-License-Identifier: Apache-2.0
"""Megatron's own script and tests, of a checkout that MEGATRON_CHECKOUT names; see docs/megatron.md."""

import os
import sys
from pathlib import Path

import pytest

NAMED = os.environ.get("MEGATRON_CHECKOUT")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "megatron"))
if NAMED:
    sys.path.insert(0, str(Path(NAMED).resolve()))  # before a megatron-core that is installed
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

    import harness
    import on_cpu  # noqa: F401  sets variables that torch reads

    # Importing all this takes half a minute; ranks are forked from a process that has done it.
    harness.PRELOAD.extend([
        "torch", "torch.distributed", "torch._dynamo", "bps_rdma.torch", "bps_rdma.megatron", "cpu", "megatron.core",
        "megatron.training", "model_provider", "gpt_builders",
    ])  # fmt: skip


def pytest_report_header():
    return f"Megatron checkout: {NAMED or 'none'}"


@pytest.fixture(scope="session")
def checkout() -> Path:
    if not NAMED:
        pytest.skip("MEGATRON_CHECKOUT does not name a checkout of Megatron-LM")
    folder = Path(NAMED).resolve()
    if not (folder / "pretrain_gpt.py").is_file():
        pytest.fail(f"MEGATRON_CHECKOUT={NAMED} is no checkout of Megatron-LM: it has no pretrain_gpt.py")
    return folder

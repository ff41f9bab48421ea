# SPDX-License-Identifier: Apache-2.0
"""What tests on a real GPU share: the same body on the CPU and on the GPU gives the same, as far as kernels do."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

SMALL = {"BPS_GPU_CHUNK_BYTES": "4096", "BPS_GPU_CHUNKS": "1"}


def alike(here: Any, there: Any, where: str) -> None:
    """Kernels of a GPU round differently, which compression of gradients to 16 bits enlarges."""
    if isinstance(here, torch.Tensor):
        assert there.device.type == "cuda" or "state" in where or "object" in where, where
        rough = "16" in where
        torch.testing.assert_close(
            there.cpu().resolve_conj(), here.resolve_conj(), rtol=0.05 if rough else 1e-3,
            atol=0.03 if rough else 1e-4, msg=lambda text: f"{where}: {text}",
        )  # fmt: skip
    elif isinstance(here, dict):
        assert here.keys() == there.keys(), where
        for key in here:
            alike(here[key], there[key], f"{where}.{key}")
    elif isinstance(here, (list, tuple)):
        assert len(here) == len(there), where
        for number, pair in enumerate(zip(here, there, strict=True)):
            alike(*pair, f"{where}.{number}")
    elif isinstance(here, float):
        assert there == pytest.approx(here, rel=1e-3, abs=1e-5), where
    else:
        assert here == there, where


def use_gpu() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.set_default_device("cuda")


def on_both(bps: Any, body: Callable[..., dict[str, Any]], *args: Any) -> None:
    """Runs it on the CPU, then on the GPU, and compares."""
    on_cpu = body(bps, *args)
    before = bps.metrics()["total"]["copied_bytes"]
    use_gpu()
    on_gpu = body(bps, *args)
    alike(on_cpu, on_gpu, "")
    found = bps.metrics()["total"]
    assert found["copied_bytes"] - before < 1 << 20, "chunks are copied by the GPU alone"
    is_on_route = os.environ.get("BPS_DEVICE_ROUTE") == "1"
    assert (found["device_bytes_from"] > 0) == is_on_route, "the core copies by its own route alone"
    bps.shutdown()

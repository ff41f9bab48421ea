# SPDX-License-Identifier: Apache-2.0
"""Jobs whose simulated GPUs do a part among those of their host first (BPS_GPU_HOST_SUM), for the tests of that."""

from typing import Any

import harness
import torch

ON = {"BPS_GPU_HOST_SUM": "1", "BPS_GPU_CHUNK_BYTES": "4096", "BPS_GPU_CHUNKS": "1"}
TCP = {"BPS_TRANSPORT": "tcp"}


def on(layout: str, **more: str) -> dict[str, Any]:
    """Options of a job whose ranks are on these hosts."""
    return harness.on_hosts(layout) | {"env": ON | more}


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Those of a rank: small whole numbers, whose sums are exact."""
    return torch.randint(-50, 50, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)

# SPDX-License-Identifier: Apache-2.0
"""The memory of a tensor as bytes."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor.

    One of a single element is contiguous whatever its strides are, and view(-1) would keep them.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)

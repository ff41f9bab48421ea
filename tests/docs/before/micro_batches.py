# SPDX-License-Identifier: Apache-2.0
"""A model, and a rank's micro-batches."""

import torch

import bps_rdma.torch as bps
from bps_rdma.torch import DistributedDataParallel  # noqa: F401  # the example's

bps.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
number_of_all_micro_batches = 8
micro_batches = torch.randn(8, 3, 4).split(8 // bps.size())[bps.rank()]


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """A number to be made small."""
    return outputs.square().mean()

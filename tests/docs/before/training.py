# SPDX-License-Identifier: Apache-2.0
"""A model, an optimizer and batches, as an example's reader has them."""

import torch

import bps_rdma.torch as bps

bps.init()
torch.manual_seed(0)
model = module = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = torch.nn.functional.mse_loss
batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
steps = len(batches)


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a step's batch."""
    inputs, targets = batches[step]
    return inputs[rank::size], targets[rank::size]

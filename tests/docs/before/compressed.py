# SPDX-License-Identifier: Apache-2.0
"""Models, an optimizer and an array whose gradients and sums are to travel compressed."""

import numpy as np
import torch

import bps_rdma.torch as bps
from bps_rdma.torch import DistributedDataParallel

bps.init()
torch.manual_seed(0)
model = torch.nn.Linear(400, 200)
other_model = torch.nn.Linear(4, 2)
array = np.ones(1000, dtype="float32")
ddp = DistributedDataParallel(torch.nn.Linear(400, 200), compression=bps.Int4(feedback=True))
ddp(torch.ones(1, 400)).sum().backward()
optimizer = torch.optim.SGD(other_model.parameters(), lr=0.1)

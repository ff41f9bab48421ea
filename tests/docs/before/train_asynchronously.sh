# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# A script that trains with DistributedOptimizer.
cat > train.py <<'END'
import torch
import bps_rdma.torch as bps

bps.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
END

# SPDX-License-Identifier: Apache-2.0
"""A training loop with Lightning's Fabric, whose gradients bps_rdma averages; or on one of torch's backends alone.

torchrun --nproc-per-node 2 examples/frameworks/fabric.py [bps|gloo]
"""

import sys

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from bps_rdma.torch.lightning import BpsFabricStrategy

others = [DDPStrategy(process_group_backend=name) for name in sys.argv[1:]]  # to compare with
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=others[0] if others else BpsFabricStrategy())
fabric.launch()
fabric.seed_everything(1)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 2))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 2))
batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))

losses = []
for inputs, targets in batches:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    losses.append(fabric.all_reduce(loss.detach()).item())
if fabric.is_global_zero:
    print("losses:", *losses)
    print("weights:", sum(one.detach().double().sum().item() for one in model.parameters()).hex())
    print("backend:", torch.distributed.get_backend())
fabric.barrier()
torch.distributed.destroy_process_group()

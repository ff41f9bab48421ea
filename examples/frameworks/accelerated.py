# SPDX-License-Identifier: Apache-2.0
"""A training loop with Hugging Face's Accelerate, which knows nothing of bps_rdma.

torchrun --nproc-per-node 2 -m bps_rdma.torch.run examples/frameworks/accelerated.py
"""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 2))
batches = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

losses = []
for inputs, targets in batches:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
if accelerator.is_main_process:
    print("losses:", *losses)
    print("weights:", sum(one.detach().double().sum().item() for one in model.parameters()).hex())
    print("backend:", torch.distributed.get_backend())
accelerator.end_training()

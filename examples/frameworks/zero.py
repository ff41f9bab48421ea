# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, of a stage from 1 to 3, on the backend bps.

torchrun --nproc-per-node 2 examples/frameworks/zero.py [STAGE] [gloo]
"""

import sys

import deepspeed
import torch
from torch import nn

import bps_rdma.torch  # noqa: F401  # registers the backend

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 3
deepspeed.init_distributed(dist_backend=sys.argv[2] if len(sys.argv) > 2 else "bps")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
options = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)

generator = torch.Generator().manual_seed(2 + engine.global_rank)
losses = []
for _ in range(8):
    inputs, targets = torch.randn(8, 8, generator=generator), torch.randn(8, 2, generator=generator)
    loss = nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    losses.append(total.item())
with deepspeed.zero.GatheredParameters(list(model.parameters())):  # stage 3 has them in parts
    weights = sum(one.detach().double().sum().item() for one in model.parameters())
if engine.global_rank == 0:
    print("losses:", *losses)
    print("weights:", float(weights).hex())
    print("backend:", torch.distributed.get_backend())
torch.distributed.destroy_process_group()

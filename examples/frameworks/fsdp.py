# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (fully_shard) on the backend bps, and a checkpoint of it with torch.distributed.checkpoint.

torchrun --nproc-per-node 2 examples/frameworks/fsdp.py [gloo]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import bps_rdma.torch  # noqa: F401  # registers the backend


def make(mesh: DeviceMesh, width: int = 64, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters lie in parts on the ranks of the mesh, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Makes a step, and returns the loss of this rank."""
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main() -> None:
    """Trains, saves, goes on with another model from what was saved, and prints what came of it."""
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "bps")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = make(mesh)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # one that all ranks see
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    losses = []
    for number in range(8):
        if number == 4:
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(saved, checkpoint_id=folder[0])
            model, optimizer = make(mesh, seed=3)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=folder[0])
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        inputs = torch.randn(16, 8, generator=generator)
        loss = torch.tensor(step(model, optimizer, inputs, inputs[:, :2]))
        dist.all_reduce(loss)
        losses.append(loss.item())
    weights = sum(one.full_tensor().detach().double().sum().item() for one in model.parameters())
    if dist.get_rank() == 0:
        print("losses:", *losses)
        print("weights:", weights.hex())
        print("backend:", dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

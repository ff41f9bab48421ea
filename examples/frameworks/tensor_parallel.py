# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism of torch on the backend bps: two ranks share each layer. With four, FSDP2 as well.

torchrun --nproc-per-node 2 examples/frameworks/tensor_parallel.py [gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import bps_rdma.torch  # noqa: F401  # registers the backend


class Block(nn.Module):
    """Two layers behind a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (samples, places, width) makes the same."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make(mesh: DeviceMesh, width: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose layers are divided among the ranks of mesh["tensor"], and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(width), Block(width))
    plan = {
        "norm": SequenceParallel(),  # of the places, each rank has a part
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh["tensor"], plan)
        if mesh["data"].size() > 1:
            fully_shard(block, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, mesh: DeviceMesh) -> float:
    """Makes a step with inputs of (samples, places, width), and returns the loss of this rank's places."""
    own = inputs.chunk(mesh["tensor"].size(), 1)[mesh["tensor"].get_local_rank()]
    loss = (model(own) - own.flip(2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    """Trains, and prints what came of it."""
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "bps")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model, optimizer = make(mesh)
    generator = torch.Generator().manual_seed(2 + mesh["data"].get_local_rank())
    losses = []
    for _ in range(8):
        loss = torch.tensor(step(model, optimizer, torch.randn(4, 6, 16, generator=generator), mesh))
        for side in ("tensor", "data"):
            dist.all_reduce(loss, group=mesh.get_group(side))
        losses.append(loss.item())
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    if dist.get_rank() == 0:
        print("losses:", *losses)
        print("weights:", sum(one.detach().double().sum().item() for one in wholes).hex())
        print("backend:", dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

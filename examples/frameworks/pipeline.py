# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining on the backend bps: each rank has some of the layers.

torchrun --nproc-per-node 2 examples/frameworks/pipeline.py [GPipe or 1F1B] [gloo]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import bps_rdma.torch  # noqa: F401  # registers the backend

PIECES = 4  # of a batch
Schedule = ScheduleGPipe | Schedule1F1B


def make(kind: str, width: int = 16, group: dist.ProcessGroup | None = None) -> tuple[Schedule, torch.optim.Optimizer]:
    """The schedule of this rank's layers, and their optimizer."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2 * size)]
    own = nn.Sequential(*layers[2 * rank : 2 * rank + 2])
    stage = PipelineStage(own, rank, size, torch.device("cpu"), group=group)
    schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[kind](stage, PIECES, loss_fn=nn.functional.mse_loss)
    return schedule, torch.optim.AdamW(own.parameters(), lr=1e-2)


def step(schedule: Schedule, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, place: str) -> float:
    """Makes a step with inputs of (samples, width), and returns the loss: on the last rank, elsewhere 0."""
    losses: list[torch.Tensor] = []
    optimizer.zero_grad()
    if place == "first":
        schedule.step(inputs)
    elif place == "last":
        schedule.step(target=inputs.flip(1), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    return sum(loss.item() for loss in losses) / PIECES


def main() -> None:
    """Trains, and prints what came of it."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "1F1B"
    dist.init_process_group(sys.argv[2] if len(sys.argv) > 2 else "bps")
    schedule, optimizer = make(kind)
    place = {0: "first", dist.get_world_size() - 1: "last"}.get(dist.get_rank(), "between")
    batches = torch.randn(8, 16, 16, generator=torch.Generator().manual_seed(2))
    totals = torch.tensor([step(schedule, optimizer, batch, place) for batch in batches])
    weights = torch.stack([one.detach().double().sum() for group in optimizer.param_groups for one in group["params"]])
    dist.all_reduce(totals)
    dist.all_reduce(weights)
    if dist.get_rank() == 0:
        print("losses:", *totals.tolist())
        print("weights:", weights.sum().item().hex())
        print("backend:", dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

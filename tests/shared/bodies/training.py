# SPDX-License-Identifier: Apache-2.0
"""Training by ranks that have imported torch, each ending in a digest of all its weights.

Nothing here imports torch before a rank calls it: the process of pytest need not have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from harness import mark

STEPS = 6
STRATEGIES = ("naive", "flat", "overlap", "bucketed")


@dataclass(frozen=True)
class Trained:
    """How a rank ended. Two trainings of the same model and data are equal if their weights and losses are."""

    weights: str  # a digest of all bits
    losses: tuple[float, ...]
    transports: frozenset[str]  # that data went over, without the rank's way to itself
    servers: int

    def same_bits(self, other: Trained) -> bool:
        return (self.weights, self.losses) == (other.weights, other.losses)


def ended(bps: Any, parameters: Iterable[Any], losses: Iterable[float]) -> Trained:
    """What the rank has learned, and over what."""
    from bps_rdma import job

    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().float().numpy().tobytes())
    used = frozenset(bps.metrics()["transports"]) - {"self"}
    return Trained(digest.hexdigest(), tuple(losses), used, job.current().process.servers)


def network(width: int = 300) -> Any:
    """The same weights on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def take_steps(
    bps: Any, net: Any, optimizer: Any, steps: int = STEPS, told_after: int = 0, width: int = 8
) -> list[float]:
    """Every rank has samples of its own, of that width. Sets the mark "running" after `told_after` steps."""
    import torch

    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + bps.rank())
        loss = net(torch.randn(16, width, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step + 1 == told_after:
            mark("running")
    return losses


def ddp(bps: Any, strategies: tuple[str, ...], steps: int = STEPS, told_after: int = 0) -> list[Trained]:
    """bps_rdma.torch.DistributedDataParallel with each of these strategies, in several buckets."""
    import torch

    import bps_rdma.torch as face

    found = []
    for strategy in strategies:
        net = network()
        wrapped = face.DistributedDataParallel(net, strategy=strategy, bucket_mb=0.1)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
        losses = take_steps(bps, wrapped, optimizer, steps, told_after)
        found.append(ended(bps, net.parameters(), losses))
    return found


def zero(bps: Any) -> list[Trained]:
    """ShardedOptimizer: each rank keeps a part of the optimizer's state."""
    import torch

    import bps_rdma.torch as face

    net = network()
    wrapped = face.DistributedDataParallel(net, bucket_mb=0.1)
    optimizer = face.ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    return [ended(bps, net.parameters(), take_steps(bps, wrapped, optimizer))]


def torchs_zero(bps: Any) -> list[Trained]:
    """torch's ZeroRedundancyOptimizer and DistributedDataParallel, on the backend bps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import bps_rdma.torch  # noqa: F401  names the backend

    dist.init_process_group("bps")
    net = network()
    wrapped = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.1)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    found = ended(bps, net.parameters(), take_steps(bps, wrapped, optimizer))
    return [found]


def fsdp2(bps: Any) -> list[Trained]:
    """fully_shard() of each layer and of the whole, on the backend bps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import bps_rdma.torch  # noqa: F401

    dist.init_process_group("bps")
    net = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    losses = take_steps(bps, net, torch.optim.AdamW(net.parameters(), lr=0.01))
    found = ended(bps, [parameter.full_tensor() for parameter in net.parameters()], losses)
    return [found]


def collectives(bps: Any, count: int) -> list[Trained]:
    """No training: torch's collectives and messages on the backend bps, of so many elements; all that they gave."""
    import torch
    import torch.distributed as dist

    import bps_rdma.torch  # noqa: F401

    dist.init_process_group("bps")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    added, copied, whole, received, exchanged = (torch.empty(count) for _ in range(5))
    added.copy_(mine)
    dist.all_reduce(added)
    copied.copy_(mine)
    dist.broadcast(copied, 1)
    part = torch.empty(count // size)
    dist.reduce_scatter_tensor(part, mine.clone())
    dist.all_gather_into_tensor(whole, part)
    for request in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)
    ]):  # fmt: skip
        request.wait()
    dist.all_to_all_single(exchanged, mine)
    gathered = [torch.empty(count) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    dist.scatter(part, list(mine.chunk(size)) if rank == 1 else None, src=1)
    found = ended(bps, [added, copied, whole, received, exchanged, part, *(gathered or [])], [])
    return [found]


def fsdp1(bps: Any, width: int) -> list[Trained]:
    """FullyShardedDataParallel of two layers, each a flat parameter of width x width."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    import bps_rdma.torch  # noqa: F401

    dist.init_process_group("bps")
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    each_layer = ModuleWrapPolicy({nn.Linear})
    wrapped = FullyShardedDataParallel(net, auto_wrap_policy=each_layer, device_id=torch.device("cpu"))
    losses = take_steps(bps, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), steps=2, width=width)
    found = ended(bps, wrapped.parameters(), losses)
    return [found]


def megatron(bps: Any, options: dict[str, Any], tensors: bool = False) -> list[Trained]:
    """The small GPT of examples/megatron over push/pull; tensors: its tensor-parallel collectives as well."""
    import cpu
    import gpt
    import torch.distributed as dist

    from bps_rdma import megatron as adapter
    from bps_rdma.megatron.communicator import counts

    cpu.install()
    dist.init_process_group("gloo")
    with adapter.enabled(use_dpu_tp_reduce=tensors):
        result = gpt.train(gpt.Setup(**options))
    assert sum(counts.values()) > 0, "Megatron did not go through bps_rdma"
    found = ended(bps, [], [*result.losses, *result.norms])
    return [replace(found, weights=result.weights)]

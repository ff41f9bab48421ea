# SPDX-License-Identifier: Apache-2.0
"""What trains by sums and gathers of the GPUs of a host (BPS_GPU_HOST_SUM): the same values as on the CPU, fewer bytes.

As in test_host_sums.py, the device is simulated, with gloo in the place of NCCL.
"""

import os
from typing import Any

import harness
import on_device
import pytest
import simulated
import test_later_parameters
import torch
import torch.distributed as dist
from host_jobs import TCP, on
from torch import nn
from training import Plain, batch, loss_of, seeded, share

import bps_rdma.torch as bps_torch


def on_gpus(bps: Any, body: Any, *args: Any) -> None:
    """The body gives the same on the CPU and on the device, of which less than all is copied."""
    on_cpu = body(bps, *args)
    device = simulated.install(immediate=True)
    there = body(bps, *args)
    on_device.same(on_cpu, there, "")
    bps.shutdown()
    device.await_end()


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed"])
def test_ddp(strategy):
    """Models whose gradients become ready in another order on each rank, too: buckets wait for their turn."""
    harness.run(on_gpus, on_device.with_ddp, strategy, **on("aa"))


def test_optimizers():
    harness.run(on_gpus, on_device.with_optimizers, **on("aa"))


@harness.on_ranks(**on("aa"))
def test_a_parameter_that_trains_on_one_rank_only(bps: Any) -> None:
    """As on the CPU, all ranks raise an error, and go on when it is mended."""
    simulated.install(immediate=True)
    wraps = test_later_parameters.wraps
    test_later_parameters.wraps = lambda bps: {  # flags of others would be on the simulated device, too
        name: wrap for name, wrap in wraps(bps).items() if name.startswith("ddp")
    }
    test_later_parameters.test_a_parameter_that_trains_on_one_rank_only.on_each_rank(bps)


def copied_by_ddp(bps: Any) -> tuple[int, dict[str, torch.Tensor]]:
    device = simulated.install(immediate=True)
    model = seeded(Plain)
    ddp = bps_torch.DistributedDataParallel(model, bucket_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = device.copied_bytes
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp(batch(step, *share(bps.rank(), bps.size())))).backward()
        optimizer.step()
    return device.copied_bytes - before, on_device.kept(model)


def test_ddp_copies_its_share():
    """Half of what it copies without, but for padding, and the same weights on all ranks."""
    found = harness.run(copied_by_ddp, **on("aabb", **TCP))
    [(whole, _), *_] = harness.run(copied_by_ddp, **on("aabb", **TCP, BPS_GPU_HOST_SUM="0"))
    for copied, weights in found:
        assert 0.45 * whole < copied < 0.55 * whole
        on_device.same(found[0][1], weights, "")


@harness.on_ranks(init=False, **on("aa"))
def test_torchs_ddp(bps: Any) -> None:
    """By our hook, and on a group of our backend that stages."""
    rank, size = int(os.environ["RANK"]), 2
    dist.init_process_group("bps")
    device = simulated.install(immediate=True)
    group = dist.new_group(backend="bps")
    on_device.torchs_own(group, rank, size)
    model = seeded(Plain)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, bps_torch.ddp_comm_hook)
    tensor, before = torch.ones(3000), device.copied_bytes
    dist.all_reduce(tensor, group=group)
    loss_of(ddp(batch(0, *share(rank, size)))).backward()
    assert tensor.eq(2).all()
    assert device.copied_bytes == before, "on one host nothing leaves the GPUs"
    dist.barrier(group=group)


@harness.on_ranks(**on("aa"))
def test_sharded_optimizer(bps: Any) -> None:
    """Neither gradients nor the parameters that owners have updated leave the GPUs of the only host."""
    on_cpu = on_device.with_shards(bps, (Plain,))
    device = simulated.install(immediate=True)
    on_device.same(on_cpu, on_device.with_shards(bps, (Plain,)), "")
    model = seeded(Plain)
    ddp = bps_torch.DistributedDataParallel(model)
    optimizer = bps_torch.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    copies = device.copies
    for step in range(2):
        optimizer.zero_grad()
        loss_of(ddp(batch(step, *share(bps.rank(), bps.size())))).backward()
        optimizer.step()
    assert device.copies == copies


def torchs_collectives(group: Any, rank: int, size: int) -> None:
    """Those that have parts, in all forms."""
    whole, part = torch.full((size * 700,), float(rank + 1)), torch.empty(700)
    total = sum(range(1, size + 1))
    dist.reduce_scatter_tensor(part, whole, group=group)
    assert part.eq(total).all()
    dist.reduce_scatter(part, list(whole.chunk(size)), op=dist.ReduceOp.AVG, group=group)
    assert part.eq(total / size).all()
    part.fill_(rank)
    dist.all_gather_into_tensor(whole, part, group=group)
    assert torch.equal(whole.view(size, -1)[:, 5], torch.arange(float(size)))
    parts = [torch.empty(700) for _ in range(size)]
    dist.all_gather(parts, part, group=group)
    assert all(one.eq(number).all() for number, one in enumerate(parts))
    with dist._coalescing_manager(group, async_ops=True) as pending:
        for factor in (1, 2):
            dist.reduce_scatter_tensor(parts[factor - 1], whole.mul(factor), group=group)
    pending.wait()
    assert parts[0].eq(rank * size).all()
    assert parts[1].eq(2 * rank * size).all()
    wholes = [torch.empty(size * 700) for _ in range(2)]
    with dist._coalescing_manager(group, async_ops=True) as pending:
        for number, one in enumerate(wholes):
            dist.all_gather_into_tensor(one, part.add(number), group=group)
    pending.wait()
    for number, one in enumerate(wholes):
        assert torch.equal(one.view(size, -1)[:, 5], torch.arange(float(size)) + number)
    dist.broadcast(part, size - 1, group=group)
    assert part.eq(size - 1).all()


def with_fsdp2(group: Any, rank: int, size: int) -> None:
    """Trains a model alone and in shards."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, alone = seeded(Plain).requires_grad_(True), seeded(Plain).requires_grad_(True)
    sharded: Any = fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",)))
    for one in (alone, sharded):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(one(batch(step) if one is alone else batch(step, *share(rank, size)))).backward()
            optimizer.step()
    sharded.unshard()
    for one, other in zip(alone.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def through_torch(bps: Any, body: Any) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("bps")
    device = simulated.install(immediate=True)
    group = dist.new_group(backend="bps")
    body(group, rank, size)
    copied = device.copied_bytes
    dist.barrier(group=group)
    return copied


@pytest.mark.parametrize("body", [torchs_collectives, with_fsdp2])
def test_torchs_collectives(body):
    """On one host nothing leaves the GPUs, also of FSDP2; on two hosts half."""
    assert harness.run(through_torch, body, init=False, **on("aa")) == [0, 0]
    found = harness.run(through_torch, body, init=False, **on("aabb", **TCP))
    [whole, *_] = harness.run(through_torch, body, init=False, **on("aabb", **TCP, BPS_GPU_HOST_SUM="0"))
    assert all(0 < copied < 0.6 * whole for copied in found)

# SPDX-License-Identifier: Apache-2.0
"""A program may have set another default device (`torch.set_default_device("cuda")`): our memory lies where it must.

The device "meta", whose tensors have no memory, stands in for a GPU: whatever is put there by mistake cannot be read.
"""

from datetime import timedelta
from typing import Any

import harness
import pytest
import simulated
import torch
import torch.distributed as dist
from training import Plain, seeded

import bps_rdma.torch as bps_torch
from bps_rdma.torch import (
    DistributedDataParallel,
    DistributedOptimizer,
    ElasticSampler,
    broadcast_object,
    broadcast_optimizer_state,
)
from bps_rdma.torch.backend.pending import Call
from bps_rdma.torch.backend.work import settle

COMPRESSED = {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "1024"}


def objects(bps: Any) -> None:
    model = seeded(Plain, bps.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (bps.rank() + 1))
    sum(p.sum() for p in model.parameters() if p.requires_grad).backward()
    optimizer.step()
    sent = torch.full((3000,), float(bps.rank()))
    torch.set_default_device("meta")
    got = broadcast_object({"tensor": sent, "number": 3}, root_rank=1)
    assert got["tensor"].tolist() == [1.0] * 3000
    broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 0.2


def arrays(bps: Any) -> None:
    mine = torch.arange(6.0) + bps.rank()
    torch.set_default_device("meta")
    assert bps.all_gather(mine, name="g").flatten().tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    assert bps.reduce_scatter(mine, name="r", average=False).numel() == 3
    assert bps.push_pull(mine, name="p", average=False).tolist() == [1, 3, 5, 7, 9, 11]


def float_losses(bps: Any) -> None:
    """An optimizer's closure that returns a float, and the sampler."""
    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    torch.set_default_device("meta")

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return float(loss)

    assert isinstance(optimizer.step(closure), float)
    assert sorted([*ElasticSampler(range(10))]) == sorted({*ElasticSampler(range(10))})


def exactly(bps: Any) -> None:
    """Gradients that are summed without rounding."""
    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    ddp = DistributedDataParallel(model, exact=True)
    torch.set_default_device("meta")
    ddp(x).pow(2).mean().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.device.type == "cpu"
    assert torch.isfinite(model.weight.grad).all()


def asynchronously(bps: Any) -> None:
    """Servers that keep the weights."""
    model = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4)
    torch.set_default_device("meta")
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(x).pow(2).mean().backward()
    optimizer.step()
    assert torch.isfinite(model.weight).all()
    bps.barrier()


def of_a_process_group(_: Any) -> None:
    """torch's collectives over our backend, and a message into a tensor that is not on the CPU, which is staged."""
    dist.init_process_group("bps")
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = dist.group.WORLD
    mine, out, there = torch.full((size,), float(rank)), torch.zeros(size), torch.ones(size, device="meta")
    rows = torch.sparse_coo_tensor([[rank]], [1.0], (size,), check_invariants=True)
    torch.set_default_device("meta")
    dist.all_to_all_single(out, mine)
    assert out.tolist() == [float(r) for r in range(size)]
    dist.broadcast(out, 1)
    dist.all_reduce(mine)
    assert mine.tolist() == [1.0] * size
    group.allreduce([rows]).wait()
    assert rows.to_dense().tolist() == [1.0] * size
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=60))
    messages, call = group._collectives.messages, Call(60, True)
    if rank == 0:
        dist.send(mine, 1)
    else:
        work = messages.receive(there, 0, 0, call)
        settle(work.handles, work.finishes)


def staged_messages(bps: Any) -> None:
    """Messages of tensors on a device that is simulated."""
    rank, size = bps.rank(), bps.size()
    simulated.install(immediate=True)
    mine, out = torch.full((size,), float(rank)), torch.zeros(size)
    torch.set_default_device("meta")
    assert bps_torch.all_to_all(mine, out=out).tolist() == [float(r) for r in range(size)]
    if rank == 0:
        bps_torch.send(mine, dst=1)
    else:
        assert bps_torch.recv(out, src=0).tolist() == [0.0] * size


def feedback(bps: Any) -> None:
    """What a compression has lost, saved and loaded."""
    model = torch.nn.Linear(64, 64)
    x = torch.ones(3, 64)
    ddp = DistributedDataParallel(model, compression=bps.TopK(k=0.05, feedback=True))
    torch.set_default_device("meta")
    ddp(x).pow(2).mean().backward()
    state = ddp.compression_state_dict()
    assert state["units"]
    ddp.load_compression_state_dict(state)


@pytest.mark.parametrize(
    "body",
    [
        objects,
        arrays,
        float_losses,
        exactly,
        asynchronously,
        of_a_process_group,
        staged_messages,
        feedback,
    ],
)
def test_memory_lies_where_it_must(body):
    env = {asynchronously: {"BPS_ASYNC": "1"}, feedback: COMPRESSED}.get(body, {})
    harness.run(body, workers=2, env=env, init=body is not of_a_process_group)

# SPDX-License-Identifier: Apache-2.0
"""A real GPU, which all ranks share: every face trains there as on the CPU, and errors leave tensors as they are."""

import json
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import harness
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark
from on_device import (
    AnyOrder,
    torchs_messages,
    torchs_own,
    with_broadcasts,
    with_closure,
    with_collectives,
    with_ddp,
    with_optimizers,
    with_push_pull,
    with_shards,
)
from real_device import SMALL, on_both, use_gpu
from torch import nn
from training import Exact, Plain, batch, loss_of, seeded, share, train_alone

import bps_rdma.torch
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch import DistributedDataParallel, transfer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed"])
def test_ddp(strategy):
    harness.run(on_both, with_ddp, strategy, workers=2, env=SMALL)


@pytest.mark.parametrize("body", [with_optimizers, with_closure, with_broadcasts, with_push_pull, with_collectives])
def test_faces(body):
    harness.run(on_both, body, workers=2, env=SMALL)


def sharded(bps: Any) -> None:
    """The bias of a convolution that is normalised afterwards is left out (Images): its gradient is nothing but
    rounding, of which AdamW makes full steps."""
    on_both(bps, with_shards, (Plain, AnyOrder))


def test_sharded_optimizer():
    harness.run(sharded, workers=2, env=SMALL)


@pytest.mark.parametrize("workers", [2, 4])
@harness.on_ranks("workers", env=SMALL)
def test_ddp_trains_as_one_process(bps: Any) -> None:
    """Sums of the exact model are exact: the weights are those of one process on the whole batch, bit for bit."""
    use_gpu()
    alone, model = Exact().cuda(), Exact().cuda()
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=2.0**-10), 4)
    ddp = DistributedDataParallel(model, bucket_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(ddp(batch(step, *share(bps.rank(), bps.size())))).backward()
        optimizer.step()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def values(rank: int, count: int) -> torch.Tensor:
    return torch.randint(-100, 100, (count,), generator=torch.Generator().manual_seed(rank)).float()


@harness.on_ranks(workers=2)
def test_the_order_of_kernels_and_copies(bps: Any) -> None:
    """Kernels that take their time before; results used at once after, without a word from the host."""
    rank, count = bps.rank(), 3_000_000
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        gradient = torch.zeros(count, device="cuda")
        mine = values(rank, count).cuda()
        for _ in range(20):
            slow = slow @ slow / 64
        gradient.copy_(mine)
        shard = torch.empty(count // 2, device="cuda")
        whole = torch.empty(count, device="cuda")
        transfer.all_reduce(gradient, OperationOptions(ReduceOp.sum, "gpu sum")).wait()
        transfer.reduce_scatter(shard, gradient, OperationOptions(ReduceOp.average, "gpu shard")).wait()
        transfer.all_gather(whole, shard, OperationOptions(name="gpu gather")).wait()
        doubled = whole * 2
        expected = values(0, count) + values(1, count)
        assert torch.equal(gradient.cpu(), expected)
        assert torch.equal(doubled.cpu(), expected * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
@harness.on_ranks(workers=2, env={"BPS_GPU_HOST_SUM": "1"})
def test_gpus_of_a_host_sum(bps: Any) -> None:
    """By NCCL, after kernels that take their time. What leaves them only tells that both are in the same call."""
    rank = bps.rank()
    torch.cuda.set_device(rank)
    slow = torch.randn(4096, 4096, device="cuda")
    for count in (1, 1000, 30_000_001):
        gradient = torch.zeros(count, device="cuda")
        mine = values(rank, count).cuda()
        for _ in range(20):
            slow = slow @ slow / 64
        gradient.copy_(mine)
        transfer.all_reduce(gradient, OperationOptions(ReduceOp.sum, f"host {count}"), in_order=True).wait()
        doubled = gradient * 2
        assert torch.equal(doubled.cpu(), 2 * (values(0, count) + values(1, count)))
    assert bps.metrics()["total"]["operation_bytes"] < 2048


@harness.on_ranks(workers=2, env={"BPS_GPU_HOST_SUM": "1"})
def test_ranks_that_share_a_gpu_sum_as_without(bps: Any) -> None:
    mine = values(bps.rank(), 3000).cuda(0)
    transfer.all_reduce(mine, OperationOptions(ReduceOp.sum, "shared"), in_order=True).wait()
    assert torch.equal(mine.cpu(), values(0, 3000) + values(1, 3000))
    assert bps.metrics()["total"]["operation_bytes"] >= 12_000


@harness.on_ranks(workers=2)
def test_streams(bps: Any) -> None:
    """Each of several streams computes, reduces and goes on by itself; memory is reused at once."""
    rank, count = bps.rank(), 500_000
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for step in range(12):
        with torch.cuda.stream(streams[step % 3]):
            tensor = values(rank + 10 * step, count).cuda(non_blocking=True)
            handle = transfer.all_reduce(tensor * 2, OperationOptions(ReduceOp.sum, f"stream {step % 3}"))
            del tensor  # the allocator may give its memory to the next step
            results.append(handle.wait() + 1)
    torch.cuda.synchronize()
    for step, result in enumerate(results):
        expected = 2 * (values(10 * step, count) + values(1 + 10 * step, count)) + 1
        assert torch.equal(result.cpu(), expected), step


@harness.on_ranks(workers=2)
def test_nothing_changes_after_a_deadline(bps: Any) -> None:
    """Rank 1 comes after rank 0's deadline: what rank 0 has does not change any more, and later rounds are right."""
    rank, count = bps.rank(), 3_000_000  # three chunks
    mine = values(rank, count).cuda()
    if rank == 1:
        await_mark("told", 0)
    with pytest.raises(bps.DeadlineError):
        transfer.all_reduce(mine, OperationOptions(ReduceOp.sum, "late", timeout=2.0)).wait()
    seen = mine.clone()
    mark("told")
    time.sleep(4)  # what must not happen has had the time to
    assert torch.equal(seen, mine)
    assert torch.equal(seen.cpu(), values(rank, count))
    after = torch.ones(count, device="cuda")
    assert transfer.all_reduce(after, OperationOptions(ReduceOp.sum, "after")).wait().eq(2).all()


@harness.on_ranks(workers=2, env={"BPS_SHUTDOWN_TIMEOUT": "1"}, kills="rank 1", at="both")
def test_a_rank_that_dies(bps: Any) -> None:
    """Rank 1 is killed in the middle of things; rank 0's operations end with that error, and so does its job."""
    transfer.all_reduce(torch.zeros(9, device="cuda"), OperationOptions(ReduceOp.sum, "both")).wait()
    mark("both")
    if bps.rank() == 1:
        await_mark("never")
    pending = [
        transfer.all_reduce(torch.zeros(3_000_000, device="cuda"), OperationOptions(ReduceOp.sum, f"alone {i}"))
        for i in range(4)
    ]
    for one in pending:
        with pytest.raises(bps.PeerLostError):
            one.wait()
    bps.shutdown()


@harness.on_ranks(workers=2, init=False)
def test_through_torch(bps: Any) -> None:
    """torch's own DistributedDataParallel and FSDP, on a group of the backend that stages CUDA tensors."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    bps_rdma.torch.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    staging = dist.new_group(backend="bps")
    use_gpu()
    alone = seeded(Plain)
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 4)

    def train(model: Any, parameters: Any) -> None:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model(batch(step, *share(rank, size)))).backward()
            optimizer.step()

    def check(parameters: Any) -> None:
        for one, other in zip(alone.parameters(), parameters, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)

    model = seeded(Plain)
    hooked = nn.parallel.DistributedDataParallel(model)
    hooked.register_comm_hook(None, bps_rdma.torch.ddp_comm_hook)
    train(hooked, model.parameters())
    check(model.parameters())

    torchs_own(staging, rank, size)
    torchs_messages(staging, rank, size)

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = seeded(Plain).requires_grad_(True)
    sharded = fully_shard(model, mesh=DeviceMesh.from_group(staging, "cuda", mesh_dim_names=("ranks",)))
    alone = seeded(Plain).requires_grad_(True)
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 4)
    train(sharded, list(sharded.parameters()))
    sharded.unshard()
    check(sharded.parameters())
    dist.barrier()


def test_ddp_bench(tmp_path):
    """All methods reach the same weights."""
    done = subprocess.run(
        [sys.executable, "-m", "bps_rdma.tools.compare", "--device", "cuda", "--model", "mlp", "--rounds", "1",
         "--steps", "2", "--json", "-"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ddp-bps" in done.stdout


def waits_for_its_gpu(bps):
    if bps.rank() == 1:
        torch.cuda._sleep(20_000_000_000)  # cycles: ten seconds and more
        mark("hangs")
        torch.cuda.synchronize()
    return float(bps.push_pull(np.ones(5000, np.float32), average=False, name="w")[0])


def test_why_names_a_rank_that_waits_for_its_gpu():
    with harness.start(waits_for_its_gpu, workers=2) as job:
        job.await_marks("hangs", [1])
        job.await_call("rank 0")
        time.sleep(2)  # for so long the job hangs before `bps why` is asked, as in tests/python/commands/test_why.py
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bps_rdma", "why", "--json", "--job", job.name],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)[0]
        assert found["kind"] == "rank"
        assert [one["rank"] for one in found["culprits"]] == [1]
        assert "waits_for_its_gpu" in found["stacks"]["rank 1"]
        assert job.results() == [2, 2]

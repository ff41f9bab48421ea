# SPDX-License-Identifier: Apache-2.0
"""push_pull and its relatives on tensors, with BytePS's semantics, and joining the job over a group of torch's."""

import datetime as dt
import os
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark

import bps_rdma.torch as bps_torch


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long), 3])
@harness.on_ranks("workers")
def test_gradients_flow_through_push_pull(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for average in (False, True):
        x = torch.full((5,), float(rank + 1), requires_grad=True)
        y = bps_torch.push_pull(x, average=average)
        assert torch.equal(y, torch.full((5,), sum(range(size + 1)) / (size if average else 1)))
        # d(sum over ranks r of r * y) / dx: the gradients of all ranks arrive, summed or averaged.
        (y * rank).sum().backward()
        assert torch.equal(x.grad, torch.full((5,), sum(range(size)) / (size if average else 1)))
        assert not bps_torch.push_pull(x.detach()).requires_grad
        # d(sum over ranks of y^2) / dx, again a function of all ranks' x.
        x = torch.full((5,), float(rank + 1), requires_grad=True)
        y = bps_torch.push_pull(x, average=average)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        factor = 2.0 * size * (1 / size**2 if average else 1)  # of the sum of all x
        assert torch.allclose(gradient, torch.full((5,), factor * sum(range(size + 1))))
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert torch.allclose(second, torch.full((5,), factor * size))


@harness.on_ranks(workers=3)
def test_semantics_are_those_of_byteps(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32,
                  torch.int64):  # fmt: skip
        for shape in ((), (3,), (2, 3), (2, 2, 2)):
            x = torch.full(shape, 3 + rank, dtype=dtype)
            name = f"{dtype} {shape}"
            total = torch.full(shape, 3 * size + sum(range(size)), dtype=dtype)
            assert torch.equal(bps_torch.push_pull(x, average=False, name=name), total)
            mean = bps_torch.push_pull(x, name=name)
            assert mean.dtype == dtype
            expected = (3 * size + sum(range(size))) / size
            assert torch.equal(mean, torch.full(shape, expected).to(dtype)), "integers are rounded down"
            handle = bps_torch.push_pull_async(x, False, name)
            bps_torch.poll(handle)
            assert torch.equal(bps_torch.synchronize(handle), total)
            assert torch.equal(x, torch.full(shape, 3 + rank, dtype=dtype))
            assert bps_torch.synchronize(bps_torch.push_pull_async_inplace(x, False, name)).data_ptr() == x.data_ptr()
            assert torch.equal(x, total)
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    assert bps_torch.push_pull_inplace(parameter, average=False, name="parameter") is parameter
    assert torch.equal(parameter.detach(), torch.full((4,), float(sum(range(size)))))
    for compression, exact in (
        (bps_torch.BFloat16(everywhere=True), 2.0**-8),
        (bps_torch.Float16(everywhere=True), 2.0**-11),
    ):
        x = torch.full((1000,), 1 / 3)
        y = bps_torch.push_pull(x, compression=compression, name=compression.text)
        assert y.dtype == torch.float32
        assert 0 < (y - x).abs().max() <= exact


def names(bps: Any) -> None:
    """Calls without names meet by function, dtype and size, from different lines as well."""
    rank = bps.rank()
    for _ in range(3):
        if rank == 0:
            assert bps_torch.push_pull(torch.ones(3), False).tolist() == [2, 2, 2]
        else:
            assert bps_torch.push_pull(torch.ones(3), False).tolist() == [2, 2, 2]
        assert bps_torch.push_pull(torch.ones(4), False).tolist() == [2] * 4
        assert bps_torch.push_pull(torch.ones(4, dtype=torch.int32), False).tolist() == [2] * 4


def test_names_are_optional():
    harness.run(names, workers=2)


def elsewhere(bps: Any) -> str:
    def one() -> None:
        bps_torch.push_pull(torch.ones(3))

    def other() -> None:
        bps_torch.push_pull(torch.ones(3))

    with pytest.raises(bps.DeadlineError) as caught:
        one() if bps.rank() == 0 else other()
    mark("told")
    await_mark("told", 0, 1)  # who leaves before the other's deadline is the error there
    return str(caught.value)


def test_ranks_that_call_from_elsewhere_are_told_where():
    env = {"BPS_TIMEOUT": "2", "BPS_SHUTDOWN_TIMEOUT": "5"}
    texts = harness.run(elsewhere, workers=2, env=env)
    assert "test_ops.one.float32.3" in texts[0]
    assert "test_ops.other.float32.3" in texts[1]


@harness.on_ranks(workers=2)
def test_a_group_of_calls_is_waited_for_once(bps: Any) -> None:
    assert bps_torch.byteps_push_pull is bps_torch.push_pull_async_inplace
    bps_torch.byteps_torch_set_num_grads(3)
    for step in range(4):
        tensors = [torch.full((n,), float(step)) for n in (1, 1000, 200_000)]
        counts = [
            bps_torch.push_pull_group_sync_inplace(t, average=False, name=f"g{i}")[1] for i, t in enumerate(tensors)
        ]
        assert counts == [1, 2, 3]
        assert all(torch.equal(t, torch.full_like(t, 2.0 * step)) for t in tensors)
    bps_torch.declare("later")
    bps_torch.declare("typed", shape=(3,), dtype=torch.bfloat16)
    assert bps_torch.push_pull(torch.ones(3, dtype=torch.bfloat16), name="typed").dtype == torch.bfloat16
    assert bps_torch.get_pushpull_speed()[1] > 0


@harness.on_ranks(workers=2)
def test_mistakes_are_told_and_nothing_is_lost(bps: Any) -> None:
    with pytest.raises(bps.InvalidTensorError, match="contiguous"):
        bps_torch.push_pull_inplace(torch.ones(4, 4).t()[1:])
    with pytest.raises(bps.InvalidTensorError, match="complex64"):
        bps_torch.push_pull(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(bps.InvalidTensorError, match="meta"):
        bps_torch.push_pull(torch.ones(2, device="meta"))
    with pytest.raises(bps.UnknownHandleError):
        bps_torch.synchronize(7)
    with pytest.raises(bps.InvalidArgumentError, match="average"):
        bps.push_pull(torch.ones(2), op="mean")
    assert bps_torch.push_pull(torch.ones(2), average=False).tolist() == [2, 2], "the job goes on"


def test_names_are_where_byteps_has_them():
    import importlib

    job = "init shutdown suspend resume size rank local_size local_rank poll synchronize "
    for module, names in {
        "": job + "push_pull declare broadcast_parameters broadcast_optimizer_state broadcast_object "
        "DistributedOptimizer DistributedDataParallel Compression byteps_push_pull get_pushpull_speed",
        ".ops": job + "push_pull push_pull_async push_pull_async_inplace push_pull_inplace get_pushpull_speed "
        "push_pull_group_sync_inplace declare byteps_torch_set_num_grads Compression",
        ".parallel": job + "DistributedDataParallel declare byteps_torch_set_num_grads byteps_push_pull "
        "byteps_push_pull_group Compression",
        ".cross_barrier": job + "CrossBarrier Compression byteps_push_pull broadcast_parameters "
        "broadcast_optimizer_state DistributedOptimizer",
        ".compression": "Compression",
    }.items():
        found = importlib.import_module(f"bps_rdma.torch{module}")
        assert set(names.split()) <= set(getattr(found, "__all__", names.split())), module
        for name in names.split():
            assert callable(getattr(found, name)), f"{module}.{name}"
    whole = importlib.import_module("bps_rdma.torch")
    for name in ("init", "rank", "suspend", "synchronize"):  # the same functions, not others of the same name
        for module in ("ops", "parallel", "cross_barrier"):
            assert getattr(importlib.import_module(f"bps_rdma.torch.{module}"), name) is getattr(whole, name)


# ---- Joining


def over_a_group(bps: Any, method: str, backend: str) -> list[Any]:
    """Joins over groups of torch's, of other ranks than the launcher's variables say, twice."""
    folder = Path(os.environ["BPS_TEST_FOLDER"])
    rank, size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    port = os.environ.pop("MASTER_PORT")
    for name in ("MASTER_ADDR", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "BPS_JOB_ID", "BPS_SECRET"):
        os.environ.pop(name, None)
    seen: list[Any] = []
    for life in range(2):
        where = f"tcp://127.0.0.1:{int(port) + life}" if method == "tcp" else f"file://{folder}/store{life}"
        mine = size - 1 - rank if life else rank
        dist.init_process_group(backend, init_method=where, rank=mine, world_size=size)
        bps_torch.init()
        seen.append((bps_torch.rank(), bps_torch.size(), bps_torch.local_rank(), bps_torch.local_size()))
        assert bps_torch.push_pull(torch.tensor([mine]), average=False).item() == sum(range(size))
        half = dist.new_group([0, 1])
        if mine < 2:
            assert bps_torch.push_pull(torch.ones(2), average=False, group=half).tolist() == [2, 2]
        dist.barrier()
        dist.destroy_process_group()
    bps_torch.shutdown()
    return seen


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_joining_over_a_group_of_any_kind(method):
    seen = harness.run(over_a_group, method, "gloo", workers=3, init=False, port=harness.free_ports(2))
    assert seen == [[(r, 3, r, 3), (2 - r, 3, 2 - r, 3)] for r in range(3)]


def other_ranks(bps: Any) -> str:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 1, 2, bps.rank() == 0)
    dist.init_process_group("gloo", store=store, rank=1 - bps.rank(), world_size=2)
    with pytest.raises(bps.InvalidArgumentError) as caught:
        bps_torch.init()
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group()
    return str(caught.value)


def test_a_job_of_other_ranks_is_refused():
    (told, _) = harness.run(other_ranks, workers=2, port=harness.free_ports(2))
    assert told.startswith("this is worker 0 of 2, but rank 1 of 2")


def late(bps: Any) -> str:
    """One rank of the group never joins."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        await_mark("told", 0)
        return ""
    dist.distributed_c10d._get_default_store().set_timeout(dt.timedelta(seconds=3))
    with pytest.raises(bps.DeadlineError) as caught:
        bps_torch.init()
    mark("told")
    return str(caught.value)


def test_a_rank_that_never_joins():
    assert "every rank of the group must make this call" in harness.run(late, workers=2, init=False)[0]


@harness.on_ranks(workers=2)
def test_suspend_and_resume(bps: Any) -> None:
    """The second rank stays away for a while; a wrapped module goes on with whoever is there."""
    rank = bps_torch.rank()
    model = torch.nn.Linear(2, 1, bias=False)
    ddp = bps_torch.DistributedDataParallel(model)

    def mean() -> float:
        ddp.zero_grad()
        ddp(torch.full((1, 2), float(rank + 1))).sum().backward()
        assert model.weight.grad is not None
        return float(model.weight.grad[0, 0])

    assert [mean() for _ in range(3)] == [1.5] * 3
    bps_torch.suspend()
    assert not bps_torch.is_initialized()
    assert (bps_torch.local_rank(), bps_torch.local_size()) == (rank, 2), "as BytePS's elastic example asks meanwhile"
    if rank == 0:
        bps_torch.resume(1, global_rank=0)
        assert (bps_torch.size(), mean()) == (1, 1.0)
        bps_torch.suspend()
    bps_torch.resume(2, global_rank=rank)
    assert (bps_torch.size(), mean()) == (2, 1.5)

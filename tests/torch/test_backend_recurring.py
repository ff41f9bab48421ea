# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend: all-reduces of a tensor that comes again, whose operation is prepared."""

import functools
import gc
import weakref
from datetime import timedelta
from typing import Any

import harness
import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.failover import env
from harness import await_mark, mark

import bps_rdma
import bps_rdma.torch
from bps_rdma import _core, views
from bps_rdma.job import resume
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.prepare import prepare_unowned
from bps_rdma.torch.backend.pending import Pace
from bps_rdma.torch.backend.recurring import Recurring


def joined(**options: Any) -> tuple[int, int, Any]:
    """This rank, the number of ranks, and what the default group knows of tensors that came before."""
    dist.init_process_group("bps", **options)
    group: Any = dist.distributed_c10d._get_default_group()
    return dist.get_rank(), dist.get_world_size(), group._recurring._known


def reduced(tensor: torch.Tensor, rank: int, size: int, **options: Any) -> None:
    tensor.fill_(rank + 1)
    dist.all_reduce(tensor, **options)
    expected = size if options.get("op") == dist.ReduceOp.MAX else size * (size + 1) // 2
    assert torch.equal(tensor, torch.full_like(tensor, expected)), tensor


def comes_again(_: Any) -> None:
    rank, size, known = joined()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8):
        tensor = torch.empty(3, 5, dtype=dtype)
        for _ in range(5):
            reduced(tensor, rank, size)
        assert known[id(tensor)].operation is not None
        for _ in range(3):
            reduced(tensor, rank, size, op=dist.ReduceOp.MAX)
            reduced(tensor, rank, size)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
    from_numpy = torch.from_numpy(np.empty(7))
    leaf = torch.ones(4, requires_grad=True)
    for _ in range(4):
        reduced(from_numpy, rank, size)
        with torch.no_grad():
            reduced(leaf, rank, size)


@harness.on_ranks(workers=2)
def test_a_name_that_the_view_does_not_know_yet(bps: Any) -> None:
    tensor = torch.ones(10)
    prepare_unowned(tensor, OperationOptions(ReduceOp.sum, "new"))()
    assert tensor.eq(2).all()


def interrupted_between_views(bps: Any) -> None:
    """Rank 0 drops a tensor after an interrupt of what its view has left incomplete: the next view needs it no more.

    The interrupt comes before rank 0 goes into the next view, which the call after it does. Rank 1 begins it there.
    """
    tensor, recurring = torch.full((100_000,), 1.0 + bps.rank()), Recurring(Pace())
    for _ in range(2):
        bps.push_pull_inplace(tensor, name="again", average=True)
        recurring.note(tensor, OperationOptions(ReduceOp.sum, "again"))
    tensor.fill_(1.0 + bps.rank())
    bps.barrier()  # rank 1 has prepared its own, too
    if bps.rank() == 0:

        def interrupt() -> bool:
            hooks(resume)
            raise KeyboardInterrupt

        def hooks(resume: Any) -> None:
            _core.register_view_hooks(note_view_end=views._note_raised, resume=resume, rebound=views.rebound)

        hooks(interrupt)
        mark("started")
        with pytest.raises(KeyboardInterrupt):
            recurring.run(tensor, ReduceOp.sum, 0.0)
        kept = weakref.ref(tensor)
        del tensor
        gc.collect()
        hooks(views.resume)
        bps.push_pull_inplace(torch.zeros(3), name="goes into the next view")
        assert kept() is None, "nobody needs the memory any more"
        mark("dropped")
    else:
        bps.push_pull_inplace(torch.zeros(3), name="goes into the next view")
        with pytest.raises(bps.PeerLostError, match="its caller was interrupted"):
            recurring.run(tensor, ReduceOp.sum, 0.0)
    bps.barrier()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_tensor_whose_caller_was_interrupted_goes(transport):
    with harness.start(interrupted_between_views, workers=2, servers=2, env=env(transport)) as job:
        job.await_marks("started", [0])
        job.kill("server 1")
        job.values()


def moves_its_memory(_: Any) -> None:
    rank, size, known = joined()
    tensor = torch.empty(4, 6)
    for _ in range(3):
        reduced(tensor, rank, size)
    before = tensor.data
    before_values = before.clone()
    tensor.data = torch.empty(4, 6)
    for _ in range(3):
        reduced(tensor, rank, size)
    tensor.fill_(-1)
    assert torch.equal(before, before_values), "its old memory is somebody else's"
    tensor.t_()  # the same memory, in another order
    for _ in range(3):
        reduced(tensor, rank, size)
    tensor.t_()
    for _ in range(3):
        reduced(tensor, rank, size)
    bps_rdma.forget(tensor)
    for _ in range(3):
        reduced(tensor, rank, size)
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    bps_rdma.forget(tensor)
    for _ in range(3):
        reduced(tensor, rank, size)
    tensor.resize_(2, 6)
    for _ in range(3):
        reduced(tensor, rank, size)
    assert known[id(tensor)].operation is not None


def goes(_: Any) -> None:
    rank, size, known = joined()
    for _ in range(50):
        tensor = torch.empty(1000)
        for _ in range(3):
            reduced(tensor, rank, size)
        del tensor
    gc.collect()
    assert not known, "nothing keeps a tensor"


BODIES = [comes_again, moves_its_memory, goes]


@pytest.mark.parametrize(
    ("body", "workers"),
    [
        *((body, 3) for body in BODIES),
        *(pytest.param(body, 1, marks=() if body is comes_again else pytest.mark.long) for body in BODIES),
    ],
)
def test_a_tensor_that_comes_again(body, workers):
    harness.run(body, workers=workers, init=False)


@harness.on_ranks(workers=2, init=False)
def test_a_deadline(bps: Any) -> None:
    rank, size, _ = joined()
    tensor = torch.empty(4)
    for _ in range(4):
        reduced(tensor, rank, size)
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"the collective did not complete within its timeout: .*rank 1"):
            dist.all_reduce(tensor)
        mark("failed")
        await_mark("told", 1)
    else:
        await_mark("failed", 0)
        with pytest.raises(RuntimeError, match="rank 0 gave up"):
            dist.all_reduce(tensor)
        mark("told")
    with pytest.raises(RuntimeError, match="an earlier collective of this group was not complete in time"):
        dist.all_reduce(tensor)


@harness.on_ranks(workers=2, init=False)
def test_threads_with_tensors_of_their_own(bps: Any) -> None:
    rank, size, _ = joined()
    tensors = [torch.empty(4, dtype=torch.float32 if n else torch.float64) for n in range(2)]
    for tensor in tensors:
        reduced(tensor, rank, size)  # in one order on all ranks, which gives the operations their names

    def often(tensor: torch.Tensor) -> None:
        for _ in range(200):
            reduced(tensor, rank, size)

    harness.in_threads(*(functools.partial(often, tensor) for tensor in tensors))

# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend when something is wrong: exceptions on every rank, soon, and never a crash."""

import gc
import logging
import os
import time
import weakref
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark
from torch.distributed import distributed_c10d

import bps_rdma.torch  # noqa: F401  registers the backend

SHORT = {"BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}
# A loss is noticed when a connection ends: silence is taken for one long after SOON_S.
SILENT = SHORT | {"BPS_HEARTBEAT_TIMEOUT": str(90 * harness.PATIENCE)}
SOON_S = 40 * harness.PATIENCE


def joined() -> tuple[int, int]:
    dist.init_process_group("bps", timeout=timedelta(seconds=100))
    return dist.get_rank(), dist.get_world_size()


def fail_among_coalesced_calls(*, in_torch: bool) -> None:
    group: Any = dist.group.WORLD
    with distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True):
        dist.broadcast(torch.zeros(4), 0, async_op=True)
        dist.all_reduce(torch.zeros(4))
        if not in_torch:
            raise ZeroDivisionError("on purpose")
        dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(4))  # torch refuses it among others


@harness.on_ranks(workers=2, init=False)
def test_an_error_among_calls_that_are_coalesced(bps: Any) -> None:
    """Torch forgets none of them, and would leave out all calls that it coalesces itself from then on, in silence."""
    rank, _ = joined()
    group: Any = dist.group.WORLD
    for fails_in_torch in (False, True):
        with pytest.raises(RuntimeError if fails_in_torch else ZeroDivisionError):
            fail_among_coalesced_calls(in_torch=fails_in_torch)
        summed = torch.full((4,), rank + 1.0)
        dist.all_reduce(summed)
        assert summed.tolist() == [3.0] * 4
        later = torch.ones(1000)
        kept = weakref.ref(later)
        work = dist.broadcast(later, 0, async_op=True)
        assert work is not None
        work.wait()
        del work, later
        gc.collect()
        assert kept() is None, "what is sent later belongs to no calls that are coalesced"
        both = torch.full((2, 4), rank + 1.0)
        with distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            for one in both:
                dist.all_reduce(one, async_op=True)
        manager.wait()
        assert both.eq(3).all()


@harness.on_ranks(workers=2, init=False)
def test_wrong_arguments_are_said_before_anything_is_sent(bps: Any) -> None:
    _, size = joined()
    with pytest.raises(bps.InvalidTensorError, match="int16"):
        dist.all_reduce(torch.ones(2, dtype=torch.int16))
    with pytest.raises(bps.InvalidTensorError, match="bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)
    with pytest.raises(bps.InvalidArgumentError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0))
    with pytest.raises(bps.InvalidTensorError, match="times"):
        dist.all_gather_into_tensor(torch.ones(3 * size), torch.ones(4))
    with pytest.raises(bps.InvalidTensorError, match="times"):
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size + 1))
    with pytest.raises(bps.InvalidTensorError, match="one tensor per rank"):
        dist.all_gather([torch.ones(2)] * (size + 1), torch.ones(2))
    with pytest.raises(bps.InvalidTensorError, match="one tensor per rank"):
        dist.all_gather([torch.ones(2)] * size, torch.ones(5))
    with pytest.raises(bps.InvalidTensorError, match="one tensor per rank"):
        dist.reduce_scatter(torch.ones(2), [torch.ones(3)] * size)
    with pytest.raises(bps.InvalidTensorError, match="meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(bps.InvalidArgumentError, match="one"):
        dist.group.WORLD.allreduce([torch.ones(2), torch.ones(2)])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # and all is well afterwards
    assert float(tensor[0]) == size


def disagreeing(bps: Any, how: str) -> tuple[str, float]:
    rank, _ = joined()
    dist.all_reduce(torch.ones(4))
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    begin = time.monotonic()
    try:
        if how == "shape":
            dist.all_reduce(torch.ones(5 + (rank == 1)))
        elif how == "dtype":
            dist.broadcast(torch.ones(5, dtype=torch.int32 if rank == 1 else torch.float32), 0)
        elif how == "known":  # what rank 1 calls has been called before, what the others call has not
            dist.all_reduce(torch.ones(4 if rank == 1 else 5))
        elif how == "operation":
            dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(7))
        else:
            if rank == 1:
                await_mark("told", 0, 2)
            dist.all_reduce(torch.ones(4))
    except bps.BpsError as error:
        seconds = time.monotonic() - begin
        mark("told")
        return type(error).__name__ if error.hint else "an error without a hint", seconds
    finally:
        dist.destroy_process_group()
    return "nothing", 0.0


@pytest.mark.parametrize("how", ["shape", "dtype", pytest.param("known", marks=pytest.mark.long), "operation"])
def test_ranks_that_disagree_all_get_an_exception(how):
    found = harness.run(disagreeing, how, workers=3, init=False, env=SHORT)
    for kind, seconds in found:
        assert kind in ("MismatchError", "DeadlineError", "PeerLostError"), found
        assert seconds < SOON_S
    if how in ("shape", "dtype"):
        assert "MismatchError" in [kind for kind, _ in found]  # by whoever came second, at once


def test_ranks_that_wait_for_a_slow_one_get_the_groups_timeout():
    found = harness.run(disagreeing, "slow", workers=3, init=False, env=SHORT)
    assert [found[rank][0] for rank in (0, 2)] == ["DeadlineError"] * 2
    assert all(2.5 < found[rank][1] < SOON_S for rank in (0, 2))


@harness.on_ranks(workers=2, init=False)
def test_no_collective_meets_an_earlier_one_of_another_rank(bps: Any) -> None:
    """Rank 1 calls something else once; then both go on, in spite of what they are told."""
    rank, _ = joined()
    for size in (4, 5):
        dist.all_reduce(torch.ones(size))
    other = dist.new_group()
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    for step in range(4):
        tensor = torch.full((5 if (rank, step) == (1, 0) else 4,), float(1 + step))
        with pytest.raises(bps.DeadlineError):
            dist.all_reduce(tensor)
    ours = torch.ones(2)
    dist.all_reduce(ours, group=other)  # another group is as it was
    assert ours[0] == 2


@harness.on_ranks(workers=2, init=False)
def test_wait_takes_a_timeout_and_can_be_called_again(bps: Any) -> None:
    rank, size = joined()
    tensor = torch.ones(3)
    if rank == 1:
        await_mark("late", 0)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(bps.DeadlineError, match=r"0\.3 s"):
            work.wait(timedelta(seconds=0.3))
        mark("late")
    assert work.wait(timedelta(seconds=60))
    assert float(tensor[0]) == size


def forgotten(bps: Any, until: str) -> list[str]:
    """Rank 0 calls what rank 1 does not, and never waits for it."""
    rank, _ = joined()
    lines: list[str] = []
    noting = logging.Handler()
    noting.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bps_rdma").addHandler(noting)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0 and until == "the group ends":
        harness.eventually(dist.all_reduce(torch.ones(4), group=group, async_op=True).is_completed)
    elif rank == 0:

        def call() -> bool:
            dist.all_reduce(torch.ones(4), group=group, async_op=True)
            return False

        with pytest.raises(bps.DeadlineError, match="earlier collective of this group"):
            harness.eventually(call)
    bps.barrier()
    return lines


@pytest.mark.parametrize("until", ["the group ends", "the group is used"])
def test_a_failure_for_which_nobody_waits_is_told(until):
    lines, others = harness.run(forgotten, until, workers=2, init=False)
    assert "a collective for which nobody waited has failed" in lines[0]
    assert "worker 1" in lines[0]
    assert not others


def left_behind(bps: Any, where: str, victim: int) -> tuple[str, str]:
    rank, _ = joined()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300)) if where == "ddp" else None
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    for _ in range(2):  # DDP makes its buckets anew after the first pass
        if model is not None:
            model(torch.ones(2, 300)).sum().backward()
    mark("ready")
    if rank == victim:
        await_mark("never")
    try:
        if model is not None:
            model(torch.ones(2, 300)).sum().backward()
        elif where == "future":
            future = dist.all_reduce(tensor, async_op=True).get_future()
            doubled = future.then(lambda one: one.value()[0] * 2)
            with pytest.raises(RuntimeError, match=r"worker|scheduler"):
                future.wait()
            doubled.wait()
        else:
            dist.all_reduce(tensor)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        dist.destroy_process_group()
    return "nothing", ""


DEATHS = [("wait", 0), ("future", 2), ("ddp", 2)]
MORE_DEATHS = [("wait", 2), ("future", 0), ("ddp", 0)]


@pytest.mark.parametrize(
    ("where", "victim"), [*DEATHS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE_DEATHS)]
)
def test_a_rank_dies(where, victim):
    with harness.start(left_behind, where, victim, workers=3, init=False, env=SILENT) as job:
        job.await_marks("ready", timeout=120)
        killed = job.kill(f"rank {victim}")
        outcomes = job.outcomes(but=[victim])
        assert time.monotonic() - killed < SOON_S
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.status == 0, outcome.error + outcome.output
            assert not outcome.error, outcome.error + outcome.output
            kind, text = outcome.value
            # A future fails with torch's own exception; who calls when the loss is known already gets ours.
            assert kind == "PeerLostError" or (kind == "RuntimeError" and where != "wait"), text
            assert f"worker {victim}" in text or (victim == 0 and "scheduler" in text), text


@harness.on_ranks(workers=3, init=False, port=lambda: harness.free_ports(4))
def test_groups_come_and_go_with_other_sizes_and_ports(bps: Any) -> None:
    rank, size = joined()
    for life in range(3):
        group = dist.new_group([0, 1])
        for n in (5 + life, 9):
            tensor = torch.full((n,), float(rank))
            dist.all_reduce(tensor)
            assert float(tensor[0]) == sum(range(size))
            if rank < 2:
                dist.all_reduce(tensor, group=group)
                assert float(tensor[0]) == 2 * sum(range(size))
        dist.destroy_process_group()
        assert not bps.is_initialized()
        if life == 1 and rank == 2:
            return
        if life == 1:
            size = 2  # the next life is smaller, and meets elsewhere
        port = int(os.environ["MASTER_PORT"]) + 1 + life
        dist.init_process_group(
            "bps", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=100)
        )
        assert bps.size() == size


@harness.on_ranks(workers=2)
def test_a_job_that_runs_is_joined_and_not_left(bps: Any) -> None:
    for n in (3, 4):  # the job goes on, and the second group's names are not those of the first
        rank, size = joined()
        assert dist.get_world_size(dist.new_group([0, 1])) == 2
        tensor = torch.full((n,), float(rank))
        dist.all_reduce(tensor)
        assert float(tensor[0]) == sum(range(size))
        dist.destroy_process_group()
        assert bps.is_initialized()
        bps.barrier()  # or the other rank could meet the store of the first group, which is about to close
    with pytest.raises(bps.InvalidArgumentError, match="worker"):
        dist.init_process_group("bps", store=dist.HashStore(), rank=0, world_size=1)

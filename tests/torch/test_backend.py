# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend: every collective, in every form, against what it should give."""

import os
import warnings
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist

import bps_rdma.torch as bps_torch

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
]


def joined(backend: str = "bps", **options: Any) -> tuple[int, int]:
    dist.init_process_group(backend, **options)
    return dist.get_rank(), dist.get_world_size()


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), (found, expected)


def reductions(_: Any) -> None:
    rank, size = joined()
    for dtype in DTYPES:
        values = torch.tensor([[r + 1, 2, size - r] for r in range(size)], dtype=dtype)
        expected = {
            dist.ReduceOp.SUM: values.sum(0, dtype=dtype),
            dist.ReduceOp.MIN: values.amin(0),
            dist.ReduceOp.MAX: values.amax(0),
            dist.ReduceOp.PRODUCT: values.prod(0, dtype=dtype),
        }
        if dtype.is_floating_point:
            expected[dist.ReduceOp.AVG] = (values.sum(0) / size).to(dtype)
        for op, result in expected.items():
            tensor = values[rank].clone()
            dist.all_reduce(tensor, op=op)
            same(tensor, result)
            tensor = values[rank].clone()
            dist.reduce(tensor, dst=size - 1, op=op)
            same(tensor, result if rank == size - 1 else values[rank])  # of the others nothing changes
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags)
    same(flags, torch.tensor([True, True, False]))
    bits = torch.tensor([1 << rank, 3])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    same(bits, torch.tensor([(1 << size) - 1, 3]))
    wave = torch.full((3,), complex(rank, 1))
    dist.all_reduce(wave)
    same(wave, torch.full((3,), complex(sum(range(size)), size)))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,), check_invariants=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns once of a sparse tensor that is made without a choice of checks
        dist.all_reduce(sparse)
    same(sparse.to_dense(), torch.ones(size))


def moves(_: Any) -> None:
    rank, size = joined()
    for dtype in [*DTYPES, torch.bool, torch.int16, torch.complex64]:
        mine = torch.arange(6).view(2, 3).add(10 * rank).to(dtype)
        everyone = [torch.arange(6).view(2, 3).add(10 * r).to(dtype) for r in range(size)]
        for root in range(size):
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            same(tensor, everyone[root])
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine)
        for part, expected in zip(parts, everyone, strict=True):
            same(part, expected)
        whole = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        same(whole, torch.cat(everyone))
        views = list(torch.zeros(size, 2, 3, dtype=dtype))  # of one buffer: nothing is copied
        dist.all_gather(views, mine)
        same(torch.stack(views), torch.stack(everyone))
        whole = torch.cat([mine if r == rank else torch.zeros_like(mine) for r in range(size)])
        dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])  # its own part in place
        same(whole, torch.cat(everyone))
    number = torch.tensor(float(rank))
    dist.broadcast(number, 1)
    same(number, torch.tensor(1.0))
    uneven = [torch.empty(3 + r) for r in range(size)]
    dist.all_gather(uneven, torch.full((3 + rank,), float(rank)))
    for r, part in enumerate(uneven):
        same(part, torch.full((3 + r,), float(r)))


def scattered_reductions(_: Any) -> None:
    rank, size = joined()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        whole = torch.arange(4 * size).to(dtype)
        output = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(output, whole.clone())
        same(output, whole[4 * rank : 4 * rank + 4] * size)
        dist.reduce_scatter_tensor(output, whole.clone(), op=dist.ReduceOp.MAX)
        same(output, whole[4 * rank : 4 * rank + 4])
        buffer = whole.clone()
        dist.reduce_scatter_tensor(buffer[4 * rank : 4 * rank + 4], buffer)  # in place, as Megatron does
        same(buffer[4 * rank : 4 * rank + 4], whole[4 * rank : 4 * rank + 4] * size)
        dist.reduce_scatter(output, [torch.full((4,), r).to(dtype) for r in range(size)])
        same(output, torch.full((4,), rank * size).to(dtype))
    output = torch.empty(2 + rank)
    dist.reduce_scatter(output, [torch.full((2 + r,), float(r)) for r in range(size)], op=dist.ReduceOp.AVG)
    same(output, torch.full((2 + rank,), float(rank)))
    wave = torch.empty(2, dtype=torch.complex64)
    dist.distributed_c10d._get_default_group().reduce_scatter_single(wave, torch.full((2 * size,), 1 + 2j)).wait()
    same(wave, torch.full((2,), size * (1 + 2j)))


def from_one_to_another(_: Any) -> None:
    rank, size = joined()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(3)
    requests = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), after), dist.P2POp(dist.irecv, got, before)
    ])  # fmt: skip
    for request in requests:
        request.wait()
    same(got, torch.full((3,), float(before)))
    if rank == 0:
        assert sorted(dist.recv(got) for _ in range(size - 1)) == list(range(1, size))
    else:
        dist.send(torch.ones(3), 0)
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank)
    same(out, torch.arange(float(size)) * 10 + rank)
    group: Any = dist.distributed_c10d._get_default_group()
    group.alltoall_base(out, torch.full((size,), float(rank)), [], [], opts=dist.AllToAllOptions()).wait()
    same(out, torch.arange(float(size)))
    sent = group.send([torch.full((3,), float(rank))], dstRank=after, tag=7)
    group.recv([got], srcRank=before, tag=7).wait()
    sent.wait()
    same(got, torch.full((3,), float(before)))
    splits = [r + 1 for r in range(size)]
    out = torch.empty((rank + 1) * size)
    dist.all_to_all_single(out, torch.full((sum(splits),), float(rank)), [rank + 1] * size, splits)
    same(out, torch.arange(float(size)).repeat_interleave(rank + 1))
    exchanged_rows(rank, size)
    gathered = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), gathered, dst=1)
    if gathered is not None:
        same(torch.stack(gathered)[:, 0], torch.arange(float(size)))
    piece = torch.empty(2)
    dist.scatter(piece, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None, src=0)
    same(piece, torch.full((2,), float(rank)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "long": "x" * rank})
    assert objects == [{"rank": r, "long": "x" * r} for r in range(size)]
    words = [f"from {rank}", rank]
    dist.broadcast_object_list(words, src=1)
    assert words == ["from 1", 1]
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert taken == [f"for {rank}"]
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))


def exchanged_rows(rank: int, size: int) -> None:
    """Rows of three elements into an output that is not contiguous; each rank has nothing for one of the others."""

    def splits(r: int) -> list[int]:
        return [(r + other) % size for other in range(size)]

    count = sum(splits(rank))
    everyone = [torch.arange(3 * count).view(count, 3) + 100 * r for r in range(size)]
    out = torch.full((3, count), -1).t()
    dist.all_to_all_single(out, everyone[rank], splits(rank), splits(rank))
    same(out, torch.cat([everyone[r].split(splits(r))[rank] for r in range(size)]))
    negative = [-1, count + 1, *[0] * (size - 2)]
    for wrong in ((negative, splits(rank)), (splits(rank), negative)):
        with pytest.raises(RuntimeError, match=r"the sizes .* are not those of"):
            dist.all_to_all_single(out, everyone[rank], *wrong)


def futures_of_messages(_: Any) -> None:
    """Futures complete by themselves, in whichever thread the message is found to be over."""
    rank, size = joined()
    group: Any = dist.distributed_c10d._get_default_group()
    for count in (3, 5000):
        for waits in (False, True):
            dist.barrier()  # or a fast rank would send twice before a slow one does once
            if rank != 0:
                group.send([torch.full((count,), float(rank))], 0, 1).wait()
                continue
            got = [torch.zeros(count) for _ in range(size - 1)]
            works = [group.recv_anysource([one], 1) for one in got]
            futures = [work.get_future() for work in works]
            if waits:
                for work in works:
                    work.wait()
            for future in futures:
                future.wait()
            assert sorted(work._source_rank() for work in works) == list(range(1, size))
            for one, work in zip(got, works, strict=True):
                same(one, torch.full((count,), float(work._source_rank())))
    if rank == 0:
        group.set_timeout(timedelta(seconds=0.5))
        late = group.recv_anysource([torch.zeros(3)], 2)
        with pytest.raises(RuntimeError, match=r"nothing came within 0\.5 s from any of the ranks"):
            late.get_future().wait()
        with pytest.raises(RuntimeError, match=r"nothing came within 0\.5 s from any of the ranks"):
            late.wait()
        group.set_timeout(timedelta(seconds=300))
    dist.barrier()


BODIES = (reductions, moves, scattered_reductions, from_one_to_another, futures_of_messages)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("workers", [3, *(pytest.param(workers, marks=pytest.mark.long) for workers in (2, 4))])
def test_collectives(body, workers):
    harness.run(body, workers=workers, init=False)


@pytest.mark.long
@pytest.mark.parametrize("body", BODIES)
def test_collectives_over_tcp(body):
    harness.run(body, workers=3, init=False, env=harness.over("tcp"))


@harness.on_ranks(workers=3, init=False)
def test_many_exchanges_after_each_other(bps: Any) -> None:
    _, size = joined()
    for number in range(1000):
        out = torch.empty(size)
        dist.all_to_all_single(out, torch.full((size,), float(number)))
        same(out, torch.full((size,), float(number)))


@harness.on_ranks(workers=2, init=False)
def test_tensors_that_are_not_contiguous_are_copied_there_and_back(bps: Any) -> None:
    rank, size = joined()
    for make in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.expand(2, *t.shape)[0]):
        tensor = make(torch.arange(24.0).view(4, 6) + rank)
        expected = sum(make(torch.arange(24.0).view(4, 6) + r) for r in range(size))
        before = tensor.stride()
        dist.all_reduce(tensor)
        assert tensor.stride() == before
        assert torch.equal(tensor, expected)
        dist.broadcast(tensor.mul_(rank), 1)
        assert torch.equal(tensor, expected)
    column = torch.zeros(4, 2)[:, 0]
    whole = torch.zeros(4 * size, 2)[:, 1]
    dist.all_gather_into_tensor(whole, column + rank)
    assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(4))
    dist.reduce_scatter_tensor(column, whole)
    assert torch.equal(column, torch.full((4,), float(rank * size)))
    parts = list(torch.zeros(2, size, 3).unbind(1))
    dist.all_gather(parts, torch.full((3, 2), float(rank)).t())
    assert all(torch.equal(part, torch.full((2, 3), float(r))) for r, part in enumerate(parts))
    leaf = torch.zeros(2, 2, requires_grad=True)
    dist.all_reduce(leaf.data.t().add_(1))
    dist.broadcast(leaf, 0)


@harness.on_ranks(workers=2, init=False)
def test_what_is_completed_lies_in_the_tensor(bps: Any) -> None:
    """Also where it comes through a copy, as that of columns, and nobody calls wait()."""
    joined()
    columns = torch.ones(40, 30).t()
    harness.eventually(dist.all_reduce(columns, async_op=True).is_completed)
    assert columns.eq(2).all()


@harness.on_ranks(workers=2, init=False)
def test_names_are_alike_where_one_rank_does_not_wait(bps: Any) -> None:
    """Sizes are new on both ranks in the same order; an empty tensor needs no name, however it is called."""
    rank, _ = joined(timeout=timedelta(seconds=20 * harness.PATIENCE))
    work = dist.all_reduce(torch.empty(0), async_op=rank == 0)
    if work is not None:
        work.wait()
    tensor = torch.ones(7)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()


@harness.on_ranks(workers=3, init=False)
def test_works_and_their_futures(bps: Any) -> None:
    rank, size = joined()
    works, tensors = [], []
    for index in range(20):
        tensors.append(torch.full((1000 + index % 3,), float(rank + index)))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
    futures = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works[::2]]
    chained = futures[3].then(lambda future: float(future.value()[0]) + 1)
    total = torch.futures.collect_all(futures)
    for index, work in reversed(list(enumerate(works))):
        assert work.wait()
        assert work.wait()  # as often as one likes
        assert work.is_completed()
        assert work.is_success()
        expected = size * index + sum(range(size))
        assert float(tensors[index][5]) == expected
        same(work.result()[0], tensors[index])
    for index, future in enumerate(total.wait()):
        same(future.value(), 2 * tensors[2 * index])
    assert chained.wait() == 2 * float(tensors[6][0]) + 1
    late = works[1].get_future()  # after it is over
    same(late.wait()[0], tensors[1])
    assert late.done()

    def fails(_: Any) -> None:
        raise KeyError("of this callback alone")

    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.get_future().add_done_callback(fails)
    with pytest.raises(RuntimeError, match="of this callback alone"):
        work.get_future().then(fails).wait()
    assert work.wait()

    first = dist.all_reduce(torch.ones(3), async_op=True)
    second = first.get_future().then(lambda future: dist.all_reduce(future.value()[0], async_op=True))
    again = second.wait()
    again.wait()
    same(again.result()[0], torch.full((3,), float(size * size)))


@harness.on_ranks(workers=2, init=False)
def test_the_short_forms_of_a_groups_methods(bps: Any) -> None:
    rank, size = joined()
    group = dist.group.WORLD
    mine = torch.full((2,), float(rank))
    tensor = mine.clone()
    group.allreduce(tensor).wait()
    same(tensor, torch.full((2,), float(sum(range(size)))))
    tensor = mine.clone()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    same(tensor, torch.full((2,), size - 1.0))
    group.allreduce(tensor, dist.ReduceOp.MIN, timedelta(seconds=30)).wait()
    group.broadcast(tensor, 1).wait()
    same(tensor, torch.full((2,), size - 1.0))
    for op, expected in ((None, sum(range(size))), (dist.ReduceOp.MAX, size - 1)):
        tensor = mine.clone()
        group.reduce(tensor, 0, *([] if op is None else [op])).wait()
        same(tensor, torch.full((2,), float(expected)) if rank == 0 else mine)
    bits = torch.tensor([1 << rank])
    group.reduce(bits, 0, dist.ReduceOp.BOR).wait()
    assert rank != 0 or int(bits) == (1 << size) - 1
    parts = [torch.empty(2) for _ in range(size)]
    group.allgather(parts, mine).wait()
    same(torch.stack(parts)[:, 0], torch.arange(float(size)))
    group.reduce_scatter(tensor, parts).wait()
    same(tensor, torch.full((2,), float(size * rank)))
    group.barrier(timedelta(seconds=30)).wait()
    group.barrier().wait()


@harness.on_ranks(workers=2, init=False)
def test_the_profiler_sees_collectives(bps: Any) -> None:
    _, size = joined()
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(2)] * size, torch.ones(2))
    events = {event.name: event for event in seen.function_events if event.name.startswith("bps:")}
    assert sorted(events) == ["bps:all_gather", "bps:all_reduce"]
    assert all(event.is_async for event in events.values())
    assert events["bps:all_reduce"].input_shapes == [[3]]


@harness.on_ranks(workers=2, init=False)
def test_a_record_of_the_profiler_ends_in_another_thread_once_the_collective_is_over(bps: Any) -> None:
    _, size = joined()
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        for kind in ("sync", "async", "future"):
            work = dist.all_gather([torch.ones(2)] * size, torch.ones(2), async_op=kind != "sync")
            if kind != "sync":
                work.get_future().wait() if kind == "future" else work.wait()
            work = None  # the last reference of ours
            with torch.autograd.profiler.record_function("afterwards"):
                pass
    ours, after = (
        [event for event in seen.kineto_results.events() if event.name() == name]
        for name in ("bps:all_gather", "afterwards")
    )
    assert len(ours) == len(after) == 3
    for event, mark in zip(ours, after, strict=True):
        # 0 stands for a record that nobody ended.
        assert event.end_thread_id() not in (0, event.start_thread_id()), event.end_thread_id()
        assert event.end_ns() <= mark.start_ns()


@harness.on_ranks(workers=2, init=False)
def test_coalesced_forms(bps: Any) -> None:
    rank, size = joined()
    group = dist.group.WORLD
    before = bps.metrics()["total"]
    ones = [torch.full((n,), float(rank)) for n in (3, 4000, 5)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in ones:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
    manager.wait()
    for tensor in ones:
        assert float(tensor[-1]) == (size - 1) / 2
    wholes = [torch.zeros(n * size) for n in (3, 4000)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for n, whole in zip((3, 4000), wholes, strict=True):
            dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)), async_op=True)
    manager.wait()
    for n, whole in zip((3, 4000), wholes, strict=True):
        same(whole, torch.arange(float(size)).repeat_interleave(n))
    with dist._coalescing_manager(group):
        for n, whole in zip((3, 4000), wholes, strict=True):
            dist.reduce_scatter_tensor(whole[rank * n : (rank + 1) * n], whole)
    for n, whole in zip((3, 4000), wholes, strict=True):
        same(whole[rank * n : (rank + 1) * n], torch.full((n,), float(rank * size)))
    outputs = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [torch.full((2,), float(rank)), torch.full((3,), -float(rank))])
    for r, (two, three) in enumerate(outputs):
        same(two, torch.full((2,), float(r)))
        same(three, torch.full((3,), -float(r)))
    after = bps.metrics()["total"]
    assert after["operations"] > before["operations"]


@harness.on_ranks(workers=4, init=False)
def test_groups_that_are_apart_and_that_overlap(bps: Any) -> None:
    rank, size = joined()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # every rank makes both
    odd = dist.new_group([3, 1])
    last = dist.new_group([1, 2, 3], timeout=timedelta(seconds=50), backend="cpu:bps")
    beside = dist.new_group(list(range(size)), backend="gloo")
    backwards = dist.new_group([3, 1, 0], sort_ranks=False)
    mine = pairs[rank // 2]
    for group, members in ((mine, [rank // 2 * 2, rank // 2 * 2 + 1]), (odd, [1, 3]), (last, [1, 2, 3]),
                           (beside, range(size)), (backwards, [3, 1, 0])):  # fmt: skip
        if rank not in members:
            continue
        tensor = torch.tensor([float(rank), 1.0])
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.tensor([float(sum(members)), float(len(members))]))
        parts = [torch.empty(2) for _ in members]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
        same(torch.stack(parts)[:, 0], torch.tensor(list(members), dtype=torch.float32))
        whole = torch.empty(2 * len(members))
        dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)), group=group)
        same(whole.view(-1, 2)[:, 1], torch.tensor(list(members), dtype=torch.float32))
        out = torch.empty(1)
        dist.reduce_scatter_tensor(out, torch.tensor(list(members), dtype=torch.float32), group=group)
        same(out, torch.tensor([float(rank * len(members))]))
        word = torch.tensor([float(rank)])
        dist.broadcast(word, src=members[-1], group=group)
        same(word, torch.tensor([float(members[-1])]))
        dist.barrier(group)
    bps_torch.init()  # the job of the default group is there already
    pushed = bps_torch.push_pull(torch.full((3,), float(rank)), average=False, name="beside", group=mine)
    same(pushed, torch.full((3,), float(rank // 2 * 4 + 1)))
    dist.destroy_process_group(mine)
    dist.barrier()


@harness.on_ranks(workers=2, init=False, port=lambda: harness.free_ports(2))
def test_a_group_beside_gloo(bps: Any) -> None:
    rank, size = joined("gloo")
    with pytest.raises(bps.NotInitializedError, match="init"):
        dist.new_group([rank], backend="bps", use_local_synchronization=True)
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{int(os.environ['MASTER_PORT']) + 1}",
                            rank=rank, world_size=size)  # fmt: skip
    bps_torch.init()
    group = dist.new_group(list(range(size)), backend="bps")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), float(size * size)))


def bps_memory(bps: Any, count: int) -> torch.Tensor:
    return torch.from_numpy(bps.empty(count))


@harness.on_ranks(workers=2, init=False, env={"BPS_TRANSPORT": "shm"})
def test_contiguous_tensors_in_shared_memory_are_not_copied(bps: Any) -> None:
    rank, size = joined()
    tensor = bps_memory(bps, 1 << 20)
    whole = bps_memory(bps, size << 18)
    for _ in range(2):  # the first one declares names and maps memory
        before = dict(bps.metrics()["total"])
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        own = whole.view(size, -1)[rank]
        dist.reduce_scatter_tensor(own, whole)
        dist.all_gather_into_tensor(whole, own)
        dist.all_gather(list(whole.view(size, -1)), own)
        after = dict(bps.metrics()["total"])
    counters = {name: after[name] - before[name] for name in after}
    assert counters["operation_bytes"] > 0
    assert all(value == 0 for name, value in counters.items() if "copied" in name or "copy_bytes" in name), counters


@harness.on_ranks(workers=2, init=False)
def test_tensors_of_another_device(bps: Any) -> None:
    """The backend of the device gets what its C++ callers leave out, for example torch's DDP with CUDA tensors."""
    dist.init_process_group("bps")
    called: list[str] = []

    class Inner:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: called.append(f"{name} {type(arguments[-1]).__name__}")

    group: Any = dist.group.WORLD
    group._inner = lambda tensor: Inner()
    part, whole = torch.empty(4, device="meta"), torch.empty(4 * dist.get_world_size(), device="meta")
    parts = list(whole.chunk(dist.get_world_size()))
    group.allreduce([part])
    group.allreduce_coalesced([part])
    group.reduce([part], 0)
    group.broadcast([part], 0)
    group.allgather([parts], [part])
    group.all_gather_single(whole, part)
    group.all_gather_single_coalesced([whole], [part])
    group.reduce_scatter([part], [parts], None)
    group.reduce_scatter_single(part, whole)
    group.reduce_scatter_single_coalesced([part], [whole])
    del group._inner
    dist.barrier()  # the other rank may still be connecting to this one
    assert len(called) == 10
    assert all(each.endswith("Options") for each in called), called

# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device: none is read before it is computed or used before it is copied back, and the caller goes on.

The device is simulated (simulated.py), which proves the order of things; test_gpu.py uses a real one.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from select import POLLIN, poll
from typing import Any

import harness
import pytest
import simulated
import torch
from harness import await_mark, mark
from torch._subclasses.fake_tensor import FakeTensorMode

import bps_rdma
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.tools.inspection.commands import explain
from bps_rdma.tools.inspection.diagnosis import Diagnosis
from bps_rdma.tools.inspection.job_state import gather
from bps_rdma.torch import transfer
from bps_rdma.torch.backend.folded import sum_sparse
from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.transfer import operation

SMALL = {"BPS_GPU_CHUNK_BYTES": "8192", "BPS_GPU_CHUNKS": "3"}
LONG = bool(os.environ.get("BPS_TEST_ALL"))
ROW = 1 << 16  # bytes; chunks of reduce_scatter and all_gather have at least this much of each rank


def data(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def summed_as(name: str) -> OperationOptions:
    return OperationOptions(ReduceOp.sum, name)


@pytest.mark.parametrize("delay", [0.0, pytest.param(0.0005, marks=pytest.mark.long)], ids=["quick", "slow"])
@harness.on_ranks(workers=3, env=SMALL)
def test_results(bps: Any, delay: float) -> None:
    """All operations, sizes around chunks, several dtypes; more of them at once than there are buffers."""
    device = simulated.install(delay, immediate=True)
    rank, size = bps.rank(), bps.size()
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    per_chunk = ROW // 4
    counts = (1, 7, per_chunk - 1, per_chunk, per_chunk + 1, 2 * per_chunk + 5)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in counts if LONG or dtype == torch.float32 else counts[1::4]:
            wholes = [data(other, count * size, dtype) for other in range(size)]
            total = torch.stack([whole.to(torch.float64) for whole in wholes]).sum(0).to(dtype)
            name = f"{dtype} {count}"
            summed = wholes[rank].clone()
            pending.append((transfer.all_reduce(summed, summed_as(f"sum {name}")), summed, total))
            mine = slice(rank * count, (rank + 1) * count)
            part = torch.empty(count, dtype=dtype)
            pending.append((transfer.reduce_scatter(part, wholes[rank], summed_as(f"rs {name}")), part, total[mine]))
            inside = wholes[rank].clone()
            pending.append(
                (transfer.reduce_scatter(inside[mine], inside, summed_as(f"in {name}")), inside[mine], total[mine])
            )
            parts = torch.cat([data(other, count, dtype) for other in range(size)])
            whole = torch.empty(count * size, dtype=dtype)
            pending.append(
                (
                    transfer.all_gather(whole, data(rank, count, dtype), OperationOptions(name=f"ag {name}")),
                    whole,
                    parts,
                )
            )
            own = torch.zeros(count * size, dtype=dtype)
            own[mine] = data(rank, count, dtype)
            pending.append((transfer.all_gather(own, own[mine], OperationOptions(name=f"own {name}")), own, parts))
            # The core knows no int16: what is only moved may have any dtype.
            odd = data(rank, count).to(torch.int16)
            pending.append(
                (transfer.broadcast(odd, 1, OperationOptions(name=f"root {name}")), odd, data(1, count).to(odd.dtype))
            )
            fresh = torch.empty(count, dtype=dtype)
            first = data(rank, count, dtype)
            reduced = (
                torch.stack([data(other, count, dtype).to(torch.float64) for other in range(size)]).sum(0).to(dtype)
            )
            pending.append((transfer.all_reduce(first, summed_as(f"out {name}"), fresh), fresh, reduced))
    for number, (handle, got, expected) in enumerate(pending):
        handle.wait()
        assert torch.equal(got, expected), f"operation {number}"
    shared, largest = 3 * ROW * size, ROW * size
    assert shared <= sum(device.pinned.values()) <= shared + len(pending) * largest, "one chunk for each in progress"
    before = dict(device.pinned)
    for number, (_, got, _) in enumerate(pending):
        if got.dtype != torch.int16:
            transfer.all_reduce(torch.zeros(100_000), summed_as(f"one by one {number}")).wait()
    assert device.pinned == before, "memory for chunks grows with neither tensors nor calls"
    figures = dict(bps.metrics()["total"])
    bps.shutdown()
    device.await_end()
    assert figures["copied_bytes"] == 0, "chunks are copied by the device alone"


@harness.on_ranks(workers=2, env=SMALL)
def test_nothing_is_read_before_it_is_computed_and_used_before_it_is_there(bps: Any) -> None:
    """What is sent is what the device will have computed by then; the host does not wait for that."""
    device = simulated.install()
    gate = threading.Event()
    gradient = torch.zeros(4_000)  # with the other one as many chunks as buffers: more would wait for the copies back
    device.compute.put(gate.wait)
    device.compute.put(lambda: gradient.copy_(data(bps.rank(), 4_000)))
    operation = transfer.all_reduce(gradient, summed_as("late"))
    later = transfer.all_reduce(torch.ones(4), summed_as("later"))
    kept = [tensor.data_ptr() for tensor in device.kept]
    assert kept.count(gradient.data_ptr()) == 2, "its memory could be given to others while it is copied"
    time.sleep(0.2)  # what must not happen has had the time to
    assert not operation.done()
    assert not later.done(), "operations keep their order"
    # Copies back are held up: wait() does not wait for them, but what is computed next does.
    up = device.streams[1]
    hold = threading.Event()
    up.put(hold.wait)
    gate.set()
    operation.wait()
    later.wait()
    seen: list[torch.Tensor] = []
    device.compute.put(lambda: seen.append(gradient.clone()))
    time.sleep(0.1)  # what must not happen has had the time to
    assert not seen, "the stream went on before the result was there"
    hold.set()
    finished = device.record(device.compute)
    assert finished.wait(60)
    assert torch.equal(seen[0], data(0, 4_000) + data(1, 4_000))


@harness.on_ranks(workers=2, env=SMALL)
def test_handles(bps: Any) -> None:
    """Waited for by several threads, by a descriptor, by torch's futures; again and again."""
    device = simulated.install(delay=0.001, immediate=True)
    tensors = [data(bps.rank(), 30_000) for _ in range(3)]
    expected = data(0, 30_000) + data(1, 30_000)
    operations = [transfer.all_reduce(tensor, summed_as(f"x{i}")) for i, tensor in enumerate(tensors)]
    waiting = poll()
    waiting.register(operations[2].completion_fd(), POLLIN)
    assert waiting.poll(60_000)
    assert operations[2].done()
    assert operations[2].wait() is tensors[2]
    threads = [threading.Thread(target=operations[0].wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    work = BpsWork("push_pull", operations, (), tensors, tensors)
    assert work.get_future().wait()[1] is tensors[1]
    follows: list[int] = []
    order = device.order
    device.order = lambda *arguments: (follows.append(1), order(*arguments))[1]
    assert work.wait()
    assert len(follows) == 3, "a wait after the first one must order the caller's stream, too"
    assert work.is_success()
    for tensor in tensors:
        assert torch.equal(tensor, expected)


@harness.on_ranks(workers=2, env=SMALL)
def test_what_is_not_staged_is_copied_in_the_stream_of_the_call(bps: Any) -> None:
    """Whether copies to the results of operations that are not staged are ordered, by wait() and by a future."""
    device = simulated.install(immediate=True)
    streams = threading.local()  # as on a GPU, each thread has a current stream
    orders: list[tuple[object, object]] = []
    used: list[object] = []

    @contextlib.contextmanager
    def computing(stream: Any) -> Iterator[None]:
        before, streams.current = device.current(), stream
        yield
        streams.current = before

    device.current = lambda: getattr(streams, "current", "default")
    device.computing = computing
    device.record = lambda stream: ("event of", stream)
    device.order = lambda stream, event: orders.append((stream, event))
    rows = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True)
    found: tuple[list[bool], list[bool]] = ([], [])
    for number, called in enumerate(("first", "second")):
        tensor, streams.current = rows.clone(), called
        pending = sum_sparse(tensor, ReduceOp.sum, 2, summed_as(f"rows {number}"))
        finishes = [*pending.finishes, lambda: used.append(device.current())]
        work = BpsWork("all_reduce", pending.handles, finishes, [tensor], [tensor])
        streams.current = "another"
        if number:
            work.get_future().wait()  # its callback runs here, or in the thread that completes it
        else:
            work.wait()
        assert tensor.to_dense().tolist() == [2, 0, 4]
        followed = [stream for stream, event in orders if event == ("event of", called)]
        followers = [["another"], ["default"]] if number else [["another"]]
        found[number].extend([used[-1] == called, followed in followers])
    (waited, by_a_future) = found
    assert waited == [True, True]
    assert by_a_future == [True, True]


def test_a_future_of_what_is_not_staged_knows_its_device():
    with FakeTensorMode():
        rows = torch.empty(3, device="cuda:1")
    work = BpsWork("recv", (), (), [[torch.ones(1), rows]], [])
    assert work._cuda_devices() == [torch.device("cuda", 1)]


@harness.on_ranks(workers=2, env=SMALL)
def test_a_device_that_fails(bps: Any) -> None:
    """A device that fails once: that operation fails, on this rank at once, and later ones are right."""
    device = simulated.install(immediate=True)
    if bps.rank() == 0:
        device.fail_copy = 4
    # Rank 1 waits in vain for what rank 0 does not send.
    options = OperationOptions(ReduceOp.sum, "first", timeout=4.0 if bps.rank() == 1 else None)
    first = transfer.all_reduce(data(bps.rank(), 30_000), options)
    kind = RuntimeError if bps.rank() == 0 else bps.DeadlineError
    with pytest.raises(kind):
        first.wait()
    with pytest.raises(kind):
        first.wait()
    assert first.done()
    for number in range(5):
        after = data(bps.rank(), 30_000)
        transfer.all_reduce(after, summed_as(f"after {number}")).wait()
        assert torch.equal(after, data(0, 30_000) + data(1, 30_000))


@harness.on_ranks(workers=2, env=SMALL)
def test_nothing_changes_after_an_error(bps: Any) -> None:
    """A chunk whose result comes after the operation has raised, because of another one, is not copied up."""
    device = simulated.install(immediate=True)
    mine = data(bps.rank(), 4_000)  # two chunks
    if bps.rank() == 1:
        await_mark("failed", 0)
        with pytest.raises((bps.DeadlineError, bps.PeerLostError)):
            transfer.all_reduce(mine, summed_as("two chunks")).wait()
        return
    device.fail_copy = 2  # that of the second chunk to the host
    with pytest.raises(RuntimeError):
        transfer.all_reduce(mine, summed_as("two chunks")).wait()
    mark("failed")
    time.sleep(1)  # what must not happen has had the time to
    assert torch.equal(mine, data(0, 4_000))


@pytest.mark.parametrize(
    ("workers", "waits"),
    [(2, True), (3, False), *(pytest.param(*one, marks=pytest.mark.long) for one in ((2, False), (3, True)))],
)
@harness.on_ranks("workers", env={**SMALL, "BPS_GPU_CHUNKS": "1"})
def test_ranks_may_start_in_any_order(bps: Any, waits: bool) -> None:
    """Every rank starts its operations in an order of its own, with one shared buffer."""
    device = simulated.install(delay=0.0001, immediate=True)
    rank, size = bps.rank(), bps.size()
    counts = [1, 2048, 2049, 10_000, 30_000, 5, 7000, 20_000]
    for step in range(4):
        order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(10 * step + rank)).tolist()
        if step == 0 and size == 2:
            order = sorted(order, reverse=rank == 1)  # the worst case: A, B, ... here and ..., B, A there
        tensors = {number: data(rank, counts[number]) for number in order}
        pending = {number: transfer.all_reduce(each, summed_as(f"any {number}")) for number, each in tensors.items()}
        for number in reversed(order) if waits else sorted(order):
            pending[number].wait()
            expected = torch.stack([data(other, counts[number]) for other in range(size)]).sum(0)
            assert torch.equal(tensors[number], expected), f"step {step}, tensor {number}"
    assert sum(device.pinned.values()) <= (1 + len(counts)) * max(8192, size * ROW)


@harness.on_ranks(workers=2, env={**SMALL, "BPS_GPU_CHUNKS": "1"})
def test_rounds_of_one_name_keep_their_order(bps: Any) -> None:
    """Rounds of one name are matched by their order, although a later one could overtake an earlier one."""
    simulated.install(delay=0.0002, immediate=True)
    tensors = [data(bps.rank(), 9000) * (step + 1) for step in range(6)]
    pending = [transfer.all_reduce(tensor, summed_as("again")) for tensor in tensors]
    other = transfer.all_reduce(torch.ones(5000), summed_as("other"))
    for step, (handle, tensor) in enumerate(zip(pending, tensors, strict=True)):
        handle.wait()
        assert torch.equal(tensor, (data(0, 9000) + data(1, 9000)) * (step + 1))
    assert torch.equal(other.wait(), torch.full((5000,), 2.0))


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": "1"})
def test_a_device_that_hangs(bps: Any) -> None:
    """The device never gets there: whoever waits learns it."""
    operation._GRACE = 0.5
    device = simulated.install()
    gate = threading.Event()
    device.compute.put(gate.wait)
    tensor = torch.ones(5)
    staged = transfer.all_reduce(tensor, summed_as("stuck"))
    with pytest.raises(bps.DeadlineError) as caught:
        staged.wait()
    work = BpsWork("push_pull", [staged], (), [], [])
    with pytest.raises(bps.DeadlineError):
        work.wait(timedelta(seconds=0.1))
    gate.set()
    time.sleep(1)  # what must not happen has had the time to
    assert torch.equal(tensor, torch.ones(5)), "changed after wait() has raised"
    text = str(caught.value)
    assert "stuck: none of the chunks" in text
    assert "device" in text


@pytest.mark.long  # measures
@harness.on_ranks(workers=2, env={**SMALL, "BPS_TIMEOUT": "3"})
def test_patience_is_for_chunks(bps: Any) -> None:
    """Waiting for what is behind much else takes longer than a chunk may take, and that is no reason to give up."""
    operation._GRACE = 0.0
    simulated.install(delay=0.03, immediate=True)
    transfer.all_reduce(torch.zeros(2048 * 48), summed_as("much"))
    last = torch.ones(4)
    begin = time.monotonic()
    transfer.all_reduce(last, summed_as("last")).wait()
    assert torch.equal(last, torch.full((4,), 2.0))
    seconds = time.monotonic() - begin
    assert seconds > 3


def waits_for_a_kernel(bps: Any) -> float:
    device = simulated.install()
    if bps.rank() == 1:
        device.compute.put(lambda: await_mark("go on"))
    tensor = torch.ones(3000)
    handle = transfer.all_reduce(tensor, summed_as("behind a kernel"))
    mark("called")
    handle.wait()
    computed = threading.Event()
    device.compute.put(computed.set)
    computed.wait()
    return float(tensor[0])


def test_who_waits_for_a_gpu_is_named():
    with harness.start(waits_for_a_kernel, workers=2) as job:
        job.await_marks("called")

        def explained() -> Diagnosis | None:
            states = [state for state in gather() if {one.pid for one in state.members.values()} & {job.pid("rank 0")}]
            return explain(states[0]) if states else None

        found = job.eventually(explained, 30, "the diagnosis", until=lambda it: it is not None and it.kind == "gpu")
        assert [one.rank for one in found.culprits] == [1]
        assert "waits for its GPU: kernels before the operation have not ended" in found.text
        assert "busy elsewhere" not in found.text
        job.set_mark("go on")
        assert job.results() == [2.0, 2.0]


@harness.on_ranks(workers=2, env={**SMALL, "BPS_SHUTDOWN_TIMEOUT": "1"}, kills="rank 1", at="both")
def test_a_rank_that_dies(bps: Any) -> None:
    """Rank 1 leaves without a word; rank 0's operations end, all of them."""
    simulated.install(delay=0.001, immediate=True)
    transfer.all_reduce(torch.zeros(9), summed_as("both")).wait()
    mark("both")
    if bps.rank() == 1:
        await_mark("never")
    pending = [transfer.all_reduce(torch.zeros(100_000), summed_as(f"alone {i}")) for i in range(4)]
    kinds = set()
    for one in pending:
        with pytest.raises(bps.BpsError) as caught:
            one.wait()
        kinds.add(type(caught.value).__name__)
    bps.shutdown()
    assert " ".join(kinds) == "PeerLostError"


@harness.on_ranks(workers=2, init=False, env=SMALL)
def test_it_ends_with_the_job(bps: Any) -> None:
    """Threads and pinned memory go with the job; the next one has its own."""
    device = simulated.install(immediate=True)
    for _ in range(2):
        bps.init()
        before = threading.active_count()
        tensor = torch.ones(5000)
        transfer.all_reduce(tensor, summed_as("again")).wait()
        assert torch.equal(tensor, torch.full((5000,), 2.0))
        names = [thread.name for thread in threading.enumerate()]
        assert {"bps_rdma down", "bps_rdma up"} <= set(names)
        bps.shutdown()
        device.await_end()
        assert threading.active_count() <= before + 2  # the simulated streams


@harness.on_ranks(workers=1)
def test_wrong_input(bps: Any) -> None:
    simulated.install(immediate=True)
    with pytest.raises(bps.InvalidTensorError, match="not contiguous"):
        transfer.all_reduce(torch.zeros(4, 6).t(), OperationOptions(name="x"))
    with pytest.raises(bps.InvalidTensorError, match="a part of 3"):
        transfer.reduce_scatter(torch.zeros(3), torch.zeros(4), OperationOptions(name="x"))
    with pytest.raises(bps.InvalidTensorError, match="int32"):
        transfer.all_gather(torch.zeros(4), torch.zeros(4, dtype=torch.int32), OperationOptions(name="x"))
    with pytest.raises(bps.InvalidTensorError, match="complex"):
        transfer.all_reduce(torch.zeros(4, dtype=torch.complex64), summed_as("complex"))
    with pytest.raises(bps.InvalidTensorError, match="int16"):
        transfer.reduce_scatter(
            torch.zeros(4, dtype=torch.int16), torch.zeros(4, dtype=torch.int16), summed_as("int16")
        )
    with pytest.raises(bps.InvalidTensorError, match="no mean"):
        transfer.all_reduce(torch.zeros(4, dtype=torch.bool), OperationOptions(ReduceOp.average, "bool"))
    with pytest.raises(bps.InvalidArgumentError, match="root=5"):
        transfer.broadcast(torch.zeros(4), 5, OperationOptions(name="x"))
    empty = torch.zeros(0)
    assert transfer.all_reduce(empty, summed_as("empty")).wait() is empty


def test_memory_that_is_neither():
    with pytest.raises(bps_rdma.InvalidTensorError, match="meta"):
        transfer.device_of(torch.zeros(3, device="meta"))
    assert transfer.device_of(torch.zeros(3)) is None

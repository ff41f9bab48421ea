"""Tensors on a device: nothing is read before it is computed, nothing is used before it is back, nobody waits.

The device is simulated (simulated.py), which proves the order of things; on a machine with a GPU the last test uses it.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from select import POLLIN, poll
from typing import Any

import cluster
import pytest
import simulated
import torch

import bps_rdma
from bps_rdma.torch import staging
from bps_rdma.torch.backend.work import BpsWork

SMALL = {"BPS_GPU_CHUNK_BYTES": "8192", "BPS_GPU_CHUNKS": "3"}
ROW = 1 << 16  # bytes; chunks of reduce_scatter and all_gather have at least this much of each rank


def data(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def everything(bps: Any, delay: float) -> dict[str, int]:
    """All operations, sizes around chunks, several dtypes; more of them at once than there are slots."""
    device = simulated.install(delay, immediate=True)
    rank, size = bps.rank(), bps.size()
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    per_chunk = ROW // 4
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 7, per_chunk - 1, per_chunk, per_chunk + 1, 2 * per_chunk + 5):
            wholes = [data(other, count * size, dtype) for other in range(size)]
            total = torch.stack([whole.to(torch.float64) for whole in wholes]).sum(0).to(dtype)
            name = f"{dtype} {count}"
            summed = wholes[rank].clone()
            pending.append((staging.all_reduce(summed, f"sum {name}", "sum"), summed, total))
            mine = slice(rank * count, (rank + 1) * count)
            part = torch.empty(count, dtype=dtype)
            pending.append((staging.reduce_scatter(part, wholes[rank], f"rs {name}", "sum"), part, total[mine]))
            inside = wholes[rank].clone()
            pending.append(
                (staging.reduce_scatter(inside[mine], inside, f"in {name}", "sum"), inside[mine], total[mine])
            )
            parts = torch.cat([data(other, count, dtype) for other in range(size)])
            whole = torch.empty(count * size, dtype=dtype)
            pending.append((staging.all_gather(whole, data(rank, count, dtype), f"ag {name}"), whole, parts))
            own = torch.zeros(count * size, dtype=dtype)
            own[mine] = data(rank, count, dtype)
            pending.append((staging.all_gather(own, own[mine], f"own {name}"), own, parts))
    for number, (operation, got, expected) in enumerate(pending):
        operation.wait()
        assert torch.equal(got, expected), f"operation {number}"
    assert sum(device.pinned.values()) == 3 * ROW * size, "memory for chunks does not grow with tensors"
    figures = dict(bps.metrics()["total"])
    bps.shutdown()
    assert not device.pinned, "shutdown() left memory pinned"
    return figures


@pytest.mark.parametrize("delay", [0.0, 0.0005], ids=["quick", "slow"])
def test_results(delay):
    for figures in cluster.run(everything, delay, workers=3, env=SMALL):
        assert figures["copied_bytes"] == 0, "chunks are copied by the device alone"


def late(bps: Any) -> None:
    """What is sent is what the device will have computed by then; the host does not wait for that."""
    device = simulated.install()
    gate = threading.Event()
    gradient = torch.zeros(4_000)  # with the other one as many chunks as slots: more would wait for the copies back
    device.compute.put(gate.wait)
    device.compute.put(lambda: gradient.copy_(data(bps.rank(), 4_000)))
    operation = staging.all_reduce(gradient, "late", "sum")
    later = staging.all_reduce(torch.ones(4), "later", "sum")
    kept = [tensor.data_ptr() for tensor in device.kept]
    assert kept.count(gradient.data_ptr()) == 2, "its memory could be given to others while it is copied"
    time.sleep(0.2)
    assert not operation.done()
    assert not later.done(), "operations keep their order"
    gate.set()
    # Copies back are held up: wait() does not wait for them, but what is computed next does.
    up = device.streams[1]
    hold = threading.Event()
    up.put(hold.wait)
    operation.wait()
    later.wait()
    seen: list[torch.Tensor] = []
    device.compute.put(lambda: seen.append(gradient.clone()))
    time.sleep(0.1)
    assert not seen, "the stream went on before the result was there"
    hold.set()
    finished = device.record(device.compute)
    assert finished.wait(20)
    assert torch.equal(seen[0], data(0, 4_000) + data(1, 4_000))


def test_nothing_is_read_before_it_is_computed_and_used_before_it_is_there():
    cluster.run(late, workers=2, env=SMALL)


def as_handles(bps: Any) -> None:
    """Waited for by several threads, by a descriptor, by torch's futures; again and again."""
    device = simulated.install(delay=0.001, immediate=True)
    tensors = [data(bps.rank(), 30_000) for _ in range(3)]
    expected = data(0, 30_000) + data(1, 30_000)
    operations = [staging.all_reduce(tensor, f"x{i}", "sum") for i, tensor in enumerate(tensors)]
    waiting = poll()
    waiting.register(operations[2].completion_fd(), POLLIN)
    assert waiting.poll(20_000)
    assert operations[2].done()
    assert operations[2].wait() is tensors[2]
    threads = [threading.Thread(target=operations[0].wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
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


def test_handles():
    cluster.run(as_handles, workers=2, env=SMALL)


def broken_copy(bps: Any) -> None:
    """A device that fails once: that operation fails, on this rank at once, and later ones are right."""
    device = simulated.install(immediate=True)
    if bps.rank() == 0:
        device.fail_copy = 4
    first = staging.all_reduce(data(bps.rank(), 30_000), "first", "sum")
    kind = RuntimeError if bps.rank() == 0 else bps.DeadlineError
    with pytest.raises(kind):
        first.wait()
    with pytest.raises(kind):
        first.wait()
    assert first.done()
    if bps.rank() == 0:
        time.sleep(3)  # the other rank has to wait for its deadline
    for number in range(5):
        after = data(bps.rank(), 30_000)
        staging.all_reduce(after, f"after {number}", "sum").wait()
        assert torch.equal(after, data(0, 30_000) + data(1, 30_000))


def test_a_device_that_fails():
    cluster.run(broken_copy, workers=2, env={**SMALL, "BPS_TIMEOUT": "6"})


def stuck(bps: Any) -> str:
    """The device never gets there: whoever waits learns it."""
    from bps_rdma.torch.staging import operation

    operation._GRACE = 0.5
    device = simulated.install()
    gate = threading.Event()
    device.compute.put(gate.wait)
    staged = staging.all_reduce(torch.zeros(5), "stuck", "sum")
    with pytest.raises(bps.DeadlineError) as caught:
        staged.wait()
    work = BpsWork("push_pull", [staged], (), [], [])
    with pytest.raises(bps.DeadlineError):
        work.wait(timedelta(seconds=0.1))
    gate.set()
    return str(caught.value)


def test_a_device_that_hangs():
    for text in cluster.run(stuck, workers=2, env={"BPS_TIMEOUT": "1"}):
        assert "stuck: no chunk of it" in text
        assert "device" in text


def behind(bps: Any) -> float:
    """Waiting for what is behind much else takes longer than a chunk may take, and that is no reason to give up."""
    from bps_rdma.torch.staging import operation

    operation._GRACE = 0.0
    simulated.install(delay=0.03, immediate=True)
    staging.all_reduce(torch.zeros(2048 * 48), "much", "sum")
    last = torch.ones(4)
    begin = time.monotonic()
    staging.all_reduce(last, "last", "sum").wait()
    assert torch.equal(last, torch.full((4,), 2.0))
    return time.monotonic() - begin


def test_patience_is_for_chunks():
    for seconds in cluster.run(behind, workers=2, env={**SMALL, "BPS_TIMEOUT": "3"}):
        assert seconds > 3


def dying(bps: Any) -> str:
    """Rank 1 leaves without a word; rank 0's operations end, all of them."""
    import os

    simulated.install(delay=0.001, immediate=True)
    staging.all_reduce(torch.zeros(9), "both", "sum").wait()
    if bps.rank() == 1:
        os.kill(os.getpid(), 9)
    pending = [staging.all_reduce(torch.zeros(100_000), f"alone {i}", "sum") for i in range(4)]
    kinds = set()
    for one in pending:
        with pytest.raises(bps.BpsError) as caught:
            one.wait()
        kinds.add(type(caught.value).__name__)
    bps.shutdown()
    return " ".join(kinds)


def test_a_rank_that_dies():
    env = {**SMALL, "BPS_SHUTDOWN_TIMEOUT": "1", "BPS_HEARTBEAT_TIMEOUT": "2"}
    with cluster.Job(dying, workers=2, env=env) as job:
        assert job.outcomes()[0].value == "PeerLostError"


def two_jobs(bps: Any) -> None:
    """Threads and pinned memory go with the job; the next one has its own."""
    device = simulated.install(immediate=True)
    for _ in range(2):
        bps.init()
        before = threading.active_count()
        tensor = torch.ones(5000)
        staging.all_reduce(tensor, "again", "sum").wait()
        assert torch.equal(tensor, torch.full((5000,), 2.0))
        names = [thread.name for thread in threading.enumerate()]
        assert {"bps_rdma down", "bps_rdma up"} <= set(names)
        bps.shutdown()
        assert not {"bps_rdma down", "bps_rdma up"} & {thread.name for thread in threading.enumerate()}
        assert not device.pinned
        assert threading.active_count() <= before + 2  # the simulated streams


def test_it_ends_with_the_job():
    cluster.run(two_jobs, workers=2, init=False, env=SMALL)


def wrong(bps: Any) -> None:
    simulated.install(immediate=True)
    with pytest.raises(bps.InvalidTensorError, match="not contiguous"):
        staging.all_reduce(torch.zeros(4, 6).t(), "x")
    with pytest.raises(bps.InvalidTensorError, match="a part of 3"):
        staging.reduce_scatter(torch.zeros(3), torch.zeros(4), "x")
    with pytest.raises(bps.InvalidTensorError, match="int32"):
        staging.all_gather(torch.zeros(4), torch.zeros(4, dtype=torch.int32), "x")
    operation = staging.all_reduce(torch.zeros(4, dtype=torch.complex64), "complex")
    with pytest.raises(bps.InvalidTensorError, match="complex"):
        operation.wait()
    empty = torch.zeros(0)
    assert staging.all_reduce(empty, "empty").wait() is empty


def test_wrong_input():
    cluster.run(wrong, workers=1)


def test_memory_that_is_neither():
    with pytest.raises(bps_rdma.InvalidTensorError, match="meta"):
        staging.device_of(torch.zeros(3, device="meta"))
    assert staging.device_of(torch.zeros(3)) is None


def on_a_gpu(bps: Any) -> None:
    """The real thing: kernels that take their time before, results used at once after."""
    rank, count = bps.rank(), 3_000_000
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        for _ in range(20):
            slow = slow @ slow / 64
        gradient = data(rank, count).cuda()
        shard = torch.empty(count // 2, device="cuda")
        whole = torch.empty(count, device="cuda")
        first = staging.all_reduce(gradient, "gpu sum", "sum")
        first.wait()
        second = staging.reduce_scatter(shard, gradient, "gpu shard", "average")
        second.wait()
        third = staging.all_gather(whole, shard, "gpu gather")
        third.wait()
        doubled = whole * 2
        expected = data(0, count) + data(1, count)
        assert torch.equal(gradient.cpu(), expected)
        assert torch.equal(doubled.cpu(), expected * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_on_a_gpu():
    cluster.run(on_a_gpu, workers=2)

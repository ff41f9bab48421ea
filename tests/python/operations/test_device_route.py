# SPDX-License-Identifier: Apache-2.0
"""Arrays of a GPU by the core's own route, on a fake driver: sums, order, and what is refused."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
from bodies.children import in_child
from gpu_arrays import GpuArray, Kernel, fake
from reference.values import NUMPY_DTYPES, pushed, summed

import bps_rdma

COUNT = 300_001  # several partitions
SMALL = {"BPS_STAGING_BYTES": "65536"} | harness.cut_at(16384)  # many partitions, and few buffers


def on_gpu(transport: str, **more: str) -> dict[str, str]:
    return harness.over(transport) | gpu_arrays.env() | more


@pytest.fixture
def env() -> dict[str, str]:
    """That of tests to which the transport does not matter."""
    return on_gpu("shm")


def reduces(bps: Any, dtype: str) -> None:
    rank, size = bps.rank(), bps.size()
    fake().fake_delay(300)
    before = bps.metrics()["total"]
    array, beside = GpuArray(COUNT, dtype), GpuArray(COUNT, dtype)
    for round_ in range(3):
        mine, total = pushed(COUNT, dtype, rank, round_), summed(COUNT, dtype, range(size), round_)
        for one in (array, beside):
            one.write(mine)
        assert bps.push_pull_inplace(array, average=False, name=f"in place {dtype}") is array
        fresh = bps.push_pull(beside, average=False, name=f"beside {dtype}")
        most = bps.push_pull_async(beside, op="max", name=f"most {dtype}").wait()
        assert np.array_equal(array.read(), total)
        assert np.array_equal(fresh.read(), total)
        assert np.array_equal(beside.read(), mine)
        largest = np.max([pushed(COUNT, dtype, one, round_) for one in range(size)], axis=0)
        assert np.array_equal(most.read(), largest)
        assert all(one.is_contained() for one in (array, beside, fresh, most))
    found = bps.metrics()["total"]
    for direction in ("from", "to"):
        copies, nbytes = (
            found[f"device_{what}_{direction}"] - before[f"device_{what}_{direction}"] for what in ("copies", "bytes")
        )
        assert nbytes == 3 * 3 * array.nbytes, "each tensor is copied down once, and up once"
        assert copies > 0
        assert copies % 9 == 0, "all have as many partitions"
    assert found["copied_bytes"] == 0, "the processor copies nothing"


@harness.on_ranks("transport", workers=2, env=gpu_arrays.env)
def test_sums_are_those_of_the_host(bps: Any) -> None:
    for dtype in NUMPY_DTYPES:
        reduces(bps, dtype)


@pytest.mark.parametrize("loops", ["1", "2"])
@pytest.mark.parametrize("servers", [None, 2])
def test_sums_with_servers_and_loops(transport, servers, loops):
    harness.run(reduces, "float32", workers=3, servers=servers, env=on_gpu(transport, BPS_PUSH_THREAD=loops))


def moves(bps: Any) -> None:
    rank, size, count = bps.rank(), bps.size(), 30_000
    fake().fake_delay(300)
    assert bps.push_pull_inplace(GpuArray(0), name="nothing").shape == (0,)
    begin, end = bps.shard_bounds(count, size, rank)
    group = bps.new_group([0, size - 1], "ends") if rank in (0, size - 1) else None
    for round_ in range(3):
        mine, total = pushed(count, "float64", rank, round_), summed(count, "float64", range(size), round_)
        whole, part = gpu_arrays.of(mine), GpuArray(end - begin, "float64")
        assert bps.reduce_scatter(whole, "s", average=False, out=part) is part
        assert np.array_equal(part.read(), total[begin:end])
        assert np.array_equal(bps.reduce_scatter(whole, "n", average=True).read(), total[begin:end] / size)
        gathered = GpuArray(count, "float64", fake().fake_stream())
        bps.all_gather(part, "g", out=gathered)
        assert np.array_equal(gathered.read(), total)
        rows = bps.all_gather(gpu_arrays.of(mine[:10]), "f")
        assert np.array_equal(
            rows.read(), np.concatenate([pushed(count, "float64", r, round_)[:10] for r in range(size)])
        )
        bps.broadcast(whole, "b", root=size - 1)
        assert np.array_equal(whole.read(), pushed(count, "float64", size - 1, round_))
        bps.push(gpu_arrays.of(mine), "halves", average=False)
        bps.pull(gathered, "halves", average=False)
        assert np.array_equal(gathered.read(), total)
        if group is not None:
            ends = bps.push_pull(gpu_arrays.of(mine), "e", average=True, group=group)
            assert np.array_equal(ends.read(), summed(count, "float64", (0, size - 1), round_) / 2)
        exact = bps.push_pull(gpu_arrays.of(mine), "exact", average=False, exact=True)
        assert np.array_equal(exact.read(), total)
        assert all(one.is_contained() for one in (whole, part, gathered, rows))


def test_operations_that_move(transport):
    harness.run(moves, workers=3, env=on_gpu(transport))


@pytest.mark.parametrize("layout", ["aabb", "aab"])
def test_ranks_of_hosts_that_sum_first(layout):
    options = harness.on_hosts(layout)
    harness.run(moves, **options, env=gpu_arrays.env() | {"BPS_TRANSPORT": "shm,tcp"})


@pytest.mark.parametrize("servers", [None, 2])
@harness.on_ranks("transport", "servers", workers=3, env=lambda: gpu_arrays.env() | SMALL)
def test_weights_that_servers_keep(bps: Any) -> None:
    """Weights that servers keep; the last rank has its arrays in CPU memory."""
    rank, size = bps.rank(), bps.size()
    is_on_gpu = rank < size - 1
    fake().fake_delay(100)

    def placed(values: Any) -> Any:
        return gpu_arrays.of(values) if is_on_gpu else values.copy()

    def read(array: Any) -> Any:
        assert not is_on_gpu or array.is_contained()
        return array.read() if is_on_gpu else array

    first, added = pushed(COUNT, "float64", 0), [pushed(COUNT, "float64", one, 1) for one in range(size)]
    array = placed(pushed(COUNT, "float64", rank))
    assert bps.store(array, "w") is array
    assert np.array_equal(read(array), first)
    delta = placed(added[rank])
    fresh = bps.accumulate(delta, "w")
    assert (read(fresh) != first).any()
    bps.barrier()
    assert bps.accumulate_async(delta, "w", out=delta).wait() is delta
    bps.barrier()
    assert bps.unstore(array, "w") is array
    assert np.array_equal(read(array), first + 2 * sum(added))


def many(bps: Any) -> None:
    """All at once, in another order on each rank, with priorities, kernels in two streams and arrays of the host."""
    rank, size = bps.rank(), bps.size()
    fake().fake_delay(100)
    streams = [fake().fake_stream() for _ in range(2)]
    counts = [1 + (37 * i) % 20_000 for i in range(40)]
    for round_ in range(3):
        order = np.random.default_rng(rank + 10 * round_).permutation(len(counts))
        handles = {}
        for i in map(int, order):
            values = pushed(counts[i], "float32", rank, round_, i)
            array = values if i % 4 == 0 else gpu_arrays.of(values, streams[i % 2])
            handles[i] = bps.push_pull_async_inplace(array, name=f"t{i}", average=False, priority=i % 3)
        for i, handle in handles.items():
            array = handle.wait()
            found = array if isinstance(array, np.ndarray) else array.read()
            assert np.array_equal(found, summed(counts[i], "float32", range(size), round_, i)), i


@pytest.mark.parametrize("credit", ["0", "65536"])
def test_many_at_once_in_any_order(transport, credit):
    harness.run(many, workers=3, env=on_gpu(transport, BPS_SCHEDULING_CREDIT=credit, **SMALL))


def mixed(bps: Any) -> None:
    values = pushed(COUNT, "float32", bps.rank())
    array = values if bps.rank() == 1 else gpu_arrays.of(values)
    result = bps.push_pull(array, average=False, name="x")
    found = result if bps.rank() == 1 else result.read()
    assert np.array_equal(found, summed(COUNT, "float32", range(bps.size())))


@pytest.mark.parametrize("elastic", [False, True])
def test_some_ranks_may_have_no_gpu(transport, elastic):
    """In elastic jobs, too, where operations on arrays of the host alone would survive the loss of a server."""
    more = {"BPS_MIN_WORKERS": "1"} if elastic else {}
    harness.run(mixed, workers=3, servers=2, env=on_gpu(transport, **more))


@harness.on_ranks("env", workers=2)
def test_another_thread_may_capture_a_graph(bps: Any) -> None:
    array = GpuArray(COUNT, "float32", fake().fake_stream())
    fake().fake_capture_elsewhere()
    array.write(1)
    bps.push_pull_inplace(array, average=False, name="x")
    assert (array.read() == bps.size()).all()


def succeeds(bps: Any, handle: Any) -> bool:
    try:
        handle.wait()
    except bps.BpsError:
        return False
    return True


@harness.on_ranks("transport", workers=2, env=gpu_arrays.env)
def test_a_call_that_the_driver_refuses_fails_one_operation(bps: Any) -> None:
    """The driver refuses one call of rank 1. All ranks that have no result get the cause, and the GPU still works."""
    array = GpuArray(COUNT, "float32")
    copies = (b"cuMemcpyDtoHAsync_v2", b"cuMemcpyHtoDAsync_v2")
    for function in (b"cuStreamWaitEvent", *copies, b"cuStreamWriteValue32_v2"):
        array.write(1)
        bps.barrier()
        if bps.rank() == 1:
            fake().fake_refuse(function, 900, 0)
        handle = bps.push_pull_async_inplace(array, average=False, name="x")
        if bps.rank() == 0 and function == b"cuMemcpyHtoDAsync_v2":  # its answers may have been sent before
            assert not succeeds(bps, handle) or (array.read() == bps.size()).all()
        else:
            with pytest.raises(bps.BpsError, match=r"GPU 0 has refused a copy: .*CUDA error 900"):
                handle.wait()
        bps.barrier()
        array.write(1)
        bps.push_pull_inplace(array, average=False, name="x")
        assert (array.read() == bps.size()).all()


@harness.on_ranks("transport", workers=2, env=gpu_arrays.env)
def test_operations_wait_for_kernels_before_them(bps: Any) -> None:
    stream = fake().fake_stream()
    array, out = GpuArray(COUNT, "uint8", stream), GpuArray(COUNT, "uint8", stream)
    kernel = Kernel(array, 3)
    handle = bps.push_pull_async(array, average=False, name="behind")
    on_host = bps.push_pull(np.ones(5, np.float32), average=False, name="beside")
    assert on_host[0] == bps.size()
    assert not handle.done()
    kernel.let_go()
    assert (handle.wait().read() == 3 * bps.size()).all()
    part = GpuArray(COUNT, "uint8", fake().fake_stream())
    kernel, other = Kernel(part, 7), Kernel(out, 9)
    whole = GpuArray(bps.size() * COUNT, "uint8", stream)
    gathering = bps.all_gather_async(part, "gather", out=whole)
    assert not gathering.done()
    kernel.let_go()
    other.let_go()
    assert (gathering.wait().read() == 7).all()


def prepared(bps: Any) -> None:
    """Started again and again, each time behind kernels of another stream."""
    rank, size = bps.rank(), bps.size()
    fake().fake_delay(100)
    whole, (begin, end) = GpuArray(COUNT, "int32"), bps.shard_bounds(COUNT, size, rank)
    part, all_of, copied = GpuArray(end - begin, "int32"), GpuArray(COUNT, "int32"), GpuArray(COUNT, "int32")
    operations = [
        bps.prepare("push_pull", whole, "p", average=False),
        bps.prepare("reduce_scatter", whole, "r", average=False, out=part),
        bps.prepare("all_gather", part, "g", out=all_of),
        bps.prepare("broadcast", copied, "b", root=size - 1),
    ]
    for round_ in range(8):
        whole.stream = fake().fake_stream()
        kernel = Kernel(whole, 1 + round_ % 3)
        copied.write(10 * round_ + rank)
        operations[0].start()
        assert not operations[0].done()
        kernel.let_go()
        total = size * int(np.full(4, 1 + round_ % 3, np.uint8).view(np.int32)[0])
        assert operations[0].wait() is whole
        assert (whole.read() == total).all()
        assert operations[1]() is part
        assert operations[2]() is all_of
        assert (all_of.read() == size * total).all()
        assert (operations[3]().read() == 10 * round_ + size - 1).all()
        assert all(one.is_contained() for one in (whole, part, all_of, copied))


@pytest.mark.parametrize("loops", ["1", "2"])
def test_prepared_operations(transport, loops):
    harness.run(prepared, workers=2, env=on_gpu(transport, BPS_PUSH_THREAD=loops))


@harness.on_ranks("env", workers=2)
def test_a_prepared_operation_of_an_array_that_has_moved(bps: Any) -> None:
    """The array has other memory now: what it had may be another one's."""
    array, out, other = GpuArray(COUNT), GpuArray(COUNT), GpuArray(COUNT)
    in_place = bps.prepare("push_pull", array, "in place", average=False)
    into = bps.prepare("push_pull", array, "into", average=False, out=out)
    for one, operations in ((array, (in_place, into)), (out, (into,))):
        one.changes = {"data": (other.address, False)}
        for begin in [call for each in operations for call in (each, each.start)]:
            with pytest.raises(bps.InvalidArgumentError, match="other memory") as caught:
                begin()
            assert "again" in caught.value.hint
        one.changes = {}
    array.write(1)
    assert (into().read() == bps.size()).all(), "no refusal was a round"
    assert (in_place().read() == bps.size()).all()


def keep_until_read(bps: Any, kernel: Kernel, gone: weakref.ref[GpuArray]) -> None:
    """The array stays until the copy behind the kernel has read it, and no longer."""
    gc.collect()
    assert gone() is not None, "the device still reads it"
    kernel.let_go()

    def is_gone() -> bool:
        bps.push_pull(np.ones(3), name="next")  # which lets go of what is over
        gc.collect()
        return gone() is None

    harness.eventually(is_gone, 30, "the end of the array")


@harness.on_ranks("env", workers=1)
def test_a_prepared_operation_behind_a_late_kernel(bps: Any) -> None:
    """A round of which a late kernel has made nothing leaves the next ones alone; arrays stay while they are read."""
    array = GpuArray(COUNT, "uint8", fake().fake_stream())
    operation = bps.prepare("push_pull", array, "x", average=False, timeout=3 * harness.PATIENCE)
    kernel = Kernel(array, 3)
    with pytest.raises(bps.DeadlineError):
        operation()
    operation.start()
    assert not operation.done()
    kernel.let_go()
    assert (operation.wait().read() == 3).all(), "it has waited for the kernel"
    kernel = Kernel(array, 5)
    with pytest.raises(bps.DeadlineError):
        operation()
    gone = weakref.ref(array)
    del array, operation
    keep_until_read(bps, kernel, gone)


@harness.on_ranks("env", workers=2)
def test_a_refused_call_is_no_round_as_on_the_host(bps: Any) -> None:
    """What rank 1's process refuses is no round: the others wait until it calls again."""
    values = np.ones(COUNT, np.float32)
    if bps.rank() == 1:
        captured = GpuArray(COUNT, "float32", fake().fake_stream())
        fake().fake_begin_capture(captured.stream)
        for array, words, name in ((values[::2], "contiguous", "host"), (captured, "CUDA graph", "device")):
            with pytest.raises(bps.BpsError, match=words):
                bps.push_pull_inplace(array, name=name, average=False)
    on_gpu = gpu_arrays.of(values)
    assert (bps.push_pull_inplace(values, name="host", average=False) == bps.size()).all()
    assert (bps.push_pull_inplace(on_gpu, name="device", average=False).read() == bps.size()).all()


@harness.on_ranks("env", workers=2)
def test_nothing_grows_and_nothing_is_left(bps: Any) -> None:
    arrays = [GpuArray(1000 + i) for i in range(20)]
    operations = [bps.prepare("push_pull", array, f"p{i}") for i, array in enumerate(arrays)]

    def run(times: int) -> None:
        for _ in range(times):
            handles = [bps.push_pull_async_inplace(a, name=f"a{i}") for i, a in enumerate(arrays)]
            bps.wait(handles)
            for operation in operations:
                operation()

    def held() -> dict[str, int]:
        gc.collect()
        kept = {name: len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("task", "fd")}
        return kept | {"streams": fake().fake_streams()}

    run(20)
    before, pinned = held(), fake().fake_pinned()
    run(300)
    after, more = held(), fake().fake_pinned() - pinned
    assert more <= 4, "a buffer more on a busy machine, and none for each operation"
    files = after.pop("fd") - before.pop("fd")
    assert files <= 8, f"{files} files more: one for each buffer, and none for each operation"
    assert after == before, (after, before)
    assert fake().fake_events() <= 2 * len(arrays), "those of the operations under way, and of the ones before"
    bps.shutdown()
    assert fake().fake_streams() == fake().fake_pinned() == 0


@harness.on_ranks(workers=2, env=lambda: on_gpu("tcp"))
def test_what_does_not_compose_is_refused_by_name(bps: Any) -> None:
    array, host = GpuArray(100), np.zeros(100, np.float32)

    def refused(kind: type[Exception], words: str, call: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            call()
        assert caught.value.hint  # type: ignore[attr-defined]

    refused(bps.InvalidTensorError, "memory of a GPU", lambda: bps.ExactSum(array))
    refused(bps.InvalidTensorError, "memory of a GPU", lambda: bps.send(array, dst=1 - bps.rank()))
    refused(bps.InvalidArgumentError, "same device", lambda: bps.reduce_scatter(array, "r", out=host[:50]))
    refused(bps.InvalidTensorError, "same device", lambda: bps.all_gather(array, "g", out=np.zeros(200, np.float32)))
    refused(bps.InvalidTensorError, "same device", lambda: bps.all_gather(host[:50], "g", out=array))
    for changes, words in (
        ({"strides": (8,)}, "not contiguous"),
        ({"data": (array.address, True)}, "read-only"),
        ({"data": (host.ctypes.data, False)}, "says that it is on a GPU"),
        ({"mask": 1}, "not contiguous"),
    ):
        array.changes = changes
        refused(bps.InvalidTensorError, words, lambda: bps.push_pull_inplace(array, name="x"))
    array.changes = {}
    shifted = GpuArray(50)
    shifted.changes = {"data": (array.address + 4, False)}
    refused(bps.InvalidTensorError, "overlaps `out`", lambda: bps.all_gather(shifted, "g", out=array))
    array.changes = {"strides": (4,)}
    captured = GpuArray(100, "float32", fake().fake_stream())
    fake().fake_begin_capture(captured.stream)
    words = "push_pull of 'x': .*CUDA graph"
    refused(bps.InvalidArgumentError, words, lambda: bps.push_pull_inplace(captured, name="x"))
    refused(bps.InvalidArgumentError, words, bps.prepare("push_pull", captured, "x"))
    for one in (array, captured):
        assert (one.read() == 0).all()
    array.write(1)
    bps.push_pull_inplace(array, average=False, name="x")
    assert (array.read() == bps.size()).all(), "no refusal was a round"
    prepared = bps.prepare("push_pull", array, "x")
    assert in_child(lambda: refuses_in_child(array, prepared)) == 0


def refuses_in_child(array: GpuArray, prepared: Any) -> None:
    for begin in (prepared, prepared.start):
        with pytest.raises(bps_rdma.NotInitializedError, match="forked"):
            begin()
    bps_rdma.init(num_workers=1)
    with pytest.raises(bps_rdma.TransportError, match="forked"):
        bps_rdma.push_pull_inplace(array, name="x")
    bps_rdma.shutdown()


def without_route(bps: Any, expected: str, words: str) -> None:
    array = GpuArray(100)
    with pytest.raises(getattr(bps, expected), match=words) as caught:
        bps.push_pull_inplace(array, name="x")
    assert "BPS_DEVICE_ROUTE" in str(caught.value) or "driver" in str(caught.value)


def test_off_by_default():
    harness.run(
        without_route, "InvalidTensorError", "memory of a GPU", workers=1, env=on_gpu("shm", BPS_DEVICE_ROUTE="0")
    )


@harness.on_ranks(workers=1, env={"BPS_DEVICE_ROUTE": "1", "BPS_CUDA_LIB": "libno-such-driver.so.1"})
def test_a_driver_that_is_not_there(bps: Any) -> None:
    class Claims:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"shape": (5,), "typestr": "<f4", "data": (4096, False), "version": 3}

    with pytest.raises(bps.TransportError, match="libno-such-driver") as caught:
        bps.push_pull_inplace(Claims(), name="x")
    assert "install NVIDIA's driver" in caught.value.hint
    assert bps.push_pull(np.ones(3), average=False, name="y")[0] == 1


@harness.on_ranks("env", workers=1)
def test_an_array_stays_while_the_device_reads_it(bps: Any) -> None:
    """The deadline does not wait for the kernel; the copy that does reads the array, which stays as long."""
    array = GpuArray(1000, "uint8", fake().fake_stream())
    kernel = Kernel(array, 3)
    with pytest.raises(bps.DeadlineError):
        bps.push_pull_inplace(array, name="late", timeout=0.5)
    gone = weakref.ref(array)
    del array
    keep_until_read(bps, kernel, gone)


@pytest.mark.long  # shutdown() waits 30 s for the device; tests/cpp/device/copy_stream_test.cc has what hangs
@harness.on_ranks(workers=2, env=lambda: on_gpu("shm", BPS_SHUTDOWN_TIMEOUT=str(3 * harness.PATIENCE)))
def test_an_array_stays_while_the_device_writes_to_it(bps: Any) -> None:
    """A GPU hangs while results are copied to it, and the job ends: what it may still write to stays."""
    nbytes = 1000
    array = GpuArray(nbytes, "uint8")
    handle = bps.push_pull_async_inplace(array, name="x") if bps.rank() == 0 else None
    if handle is None:
        bps.barrier()
        bps.push_pull_inplace(array, name="x")
        return

    harness.eventually(lambda: gpu_arrays.copied(bps) == nbytes, 30, "the copy from the array")
    time.sleep(0.3)  # it ends; if it has not, the test shows less, and does not fail
    fake().fake_hang(1)
    bps.barrier()
    harness.eventually(lambda: gpu_arrays.copied(bps) == 2 * nbytes, 30, "the copy to the array")
    gone = weakref.ref(array)
    del array, handle
    bps.shutdown()
    gc.collect()
    assert gone() is not None, "the device still writes to it"
    fake().fake_hang(0)

# SPDX-License-Identifier: Apache-2.0
"""Arrays of a GPU that RDMA devices read and write themselves (BPS_GPUDIRECT), in memory that no processor may touch.

The GPU is the fake driver's, and the real device of the kernel has its pages by tests/cpp/device/fake_verbs.cc. The
processor faults where this process sees them, so a job that ends well has never touched them.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fabric
import gpu_arrays
import harness
import numpy as np
import pytest
from bodies.counters import COUNT, PARTITION
from bodies.rails import LOST, Start, carried, jobs
from gpu_arrays import GpuArray, Kernel, fake, registered
from harness import mark
from levels import cases
from reference.values import NUMPY_DTYPES, pushed, summed

CUT = harness.cut_at(PARTITION)


def direct(**more: str) -> dict[str, str]:
    return harness.over("rdma") | gpu_arrays.env_direct() | CUT | more


class PartOf:
    """Some elements of an array, as a view."""

    def __init__(self, array: GpuArray, begin: int, end: int) -> None:
        self._array = array
        self.shape = (end - begin,)
        self._address = array.address + begin * array.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._array.__cuda_array_interface__ | {"shape": self.shape, "data": (self._address, False)}


STAGED = ("device_bytes_from", "device_bytes_to", "copies", "copied_bytes")


def staged(bps: Any) -> dict[str, int]:
    """Bytes that went another way than directly."""
    found = bps.metrics()["total"]
    return {name: found[name] for name in STAGED if found[name] > 0}


def is_quiet(array: GpuArray) -> bool:
    """Nothing writes to it, or beside it."""
    before = array.read()
    time.sleep(0.2)  # what must not happen has had the time to
    return array.read().tobytes() == before.tobytes() and array.is_contained()


def sums_and_moves(bps: Any, dtypes: tuple[str, ...]) -> dict[str, int]:
    """Every operation, with the bits that arrays of the CPU get."""
    rank, size = bps.rank(), bps.size()
    fake().fake_delay(300)
    for dtype in dtypes:
        count = 30_001
        begin, end = bps.shard_bounds(count, size, rank)
        whole, out, gathered = (GpuArray(count, dtype, fake().fake_stream()) for _ in range(3))
        part, few = GpuArray(end - begin, dtype), GpuArray(3, dtype)
        for round_ in range(3):
            mine, total = pushed(count, dtype, rank, round_), summed(count, dtype, range(size), round_)
            whole.write(mine)
            few.write(mine[:3])
            assert np.array_equal(bps.push_pull(whole, average=False, name=f"fresh {dtype}").read(), total)
            largest = np.max([pushed(count, dtype, one, round_) for one in range(size)], axis=0)
            assert np.array_equal(bps.push_pull(whole, op="max", name=f"most {dtype}").read(), largest)
            bps.push_pull_inplace(few, average=False, name=f"few {dtype}")
            assert np.array_equal(few.read(), total[:3])
            assert bps.reduce_scatter(whole, f"s {dtype}", average=False, out=part) is part
            assert np.array_equal(part.read(), total[begin:end])
            gathered.write(np.where((np.arange(count) >= begin) & (np.arange(count) < end), total, 0))
            bps.all_gather(PartOf(gathered, begin, end), f"g {dtype}", out=gathered)
            assert np.array_equal(gathered.read(), total)
            bps.push(whole, f"halves {dtype}", average=False)
            bps.pull(out, f"halves {dtype}", average=False)
            assert np.array_equal(out.read(), total)
            assert np.array_equal(whole.read(), mine)
            bps.broadcast(whole, f"b {dtype}", root=size - 1)
            assert np.array_equal(whole.read(), pushed(count, dtype, size - 1, round_))
            whole.write(mine)
            bps.push_pull_inplace(whole, average=False, name=f"in place {dtype}")
            assert np.array_equal(whole.read(), total)
            assert all(one.is_contained() for one in (whole, out, gathered, part, few))
    return staged(bps)


@pytest.mark.parametrize(
    ("workers", "servers", "dtypes"), cases([(2, 1, ("float32",))], [(3, 2, NUMPY_DTYPES), (2, 2, ("float16",))])
)
def test_operations_have_the_bits_of_the_cpu_and_stage_nothing(workers, servers, dtypes):
    found = harness.run(sums_and_moves, dtypes, workers=workers, servers=servers, env=direct())
    assert found == [{}] * workers


def test_beside_the_ranks_own_servers():
    """What a rank sums itself is staged: its server is reached by memory."""
    for found in harness.run(sums_and_moves, ("float32",), workers=2, env=direct()):
        assert found["device_bytes_from"] > 0


ROUNDS = 7


def counts(bps: Any) -> tuple[dict[str, int], int]:
    array = GpuArray(COUNT)
    bps.barrier()
    before = bps.metrics()["total"]
    for _ in range(ROUNDS):
        array.write(1)
        bps.push_pull_inplace(array, average=False, name="x")
        assert (array.read() == bps.size()).all()
    bps.barrier()
    after = bps.metrics()["total"]
    return {name: after[name] - before[name] for name in after}, registered()


def test_two_writes_per_partition_and_one_registration():
    partitions = ROUNDS * COUNT * 4 // PARTITION
    env = direct(BYTEPS_PUSH_THREAD="1")
    with harness.start(counts, workers=2, servers=1, python_servers=True, env=env) as job:
        for counted, registrations in job.results():
            assert counted["partitions"] == counted["data_writes"] == partitions
            assert counted["data_bytes"] == counted["received_bytes"] == ROUNDS * COUNT * 4
            assert all(counted[name] == 0 for name in (*STAGED, "stale"))
            assert registrations == 1
        of_server = job.server_metrics()[0]
        assert of_server["data_writes"] == of_server["pushes"] == 2 * partitions


def reuses(bps: Any) -> tuple[int, dict[str, int]]:
    """Allocates and frees arrays, whose addresses come again."""
    addresses, live = set(), 0
    for step in range(8):
        array = gpu_arrays.of(np.full(COUNT, bps.rank() + step, np.float32))
        addresses.add(array.address)
        for _ in range(2):
            array.write(bps.rank() + step)
            bps.push_pull_inplace(array, average=False, name="x")
            assert (array.read() == 1 + 2 * step).all()
        if step == 7:
            bps.barrier()
            live = fabric.resources()["mr"]
            bps.barrier()
        del array
    assert len(addresses) < 8, "no address has come again, so nothing was shown"
    harness.eventually(lambda: fabric.resources()["mr"] < live, what="the end of the last registration")
    return registered(), staged(bps)


def test_memory_that_is_freed_and_comes_again():
    for registrations, found in harness.run(reuses, workers=2, servers=1, env=direct(BYTEPS_PUSH_THREAD="1")):
        assert registrations == 8
        assert found == {}


def waits_for_kernels(bps: Any) -> dict[str, int]:
    """Nothing is sent before kernels of the array's stream, and an operation whose kernels are late ends in time."""
    stream = fake().fake_stream()
    array, out = GpuArray(COUNT, "uint8", stream), GpuArray(COUNT, "uint8", stream)
    operation = bps.prepare("push_pull", array, "prepared", average=False, out=out)
    sent = bps.metrics()["total"]["data_bytes"]
    kernel = Kernel(array, 3)
    handle = bps.push_pull_async(array, average=False, name="behind")
    time.sleep(0.2)  # what must not happen has had the time to
    assert not handle.done()
    assert bps.metrics()["total"]["data_bytes"] == sent
    bps.barrier()
    kernel.let_go()
    assert (handle.wait().read() == 3 * bps.size()).all()
    for value in (1, 2, 3):
        kernel = Kernel(array, value)
        operation.start()
        kernel.let_go()
        operation.wait()
        assert (out.read() == value * bps.size()).all()
    bps.barrier()
    kernel = Kernel(array, 4) if bps.rank() == 1 else None
    with pytest.raises(bps.DeadlineError):
        bps.push_pull_inplace(array, name="late", average=False, timeout=1 + bps.rank())
    if kernel is not None:
        kernel.let_go()
        harness.eventually(lambda: bool((array.read() == 4).all()), what="the kernel")
    assert is_quiet(array)
    assert (array.read() == (3 if kernel is None else 4)).all()
    bps.barrier()
    array.write(5)
    bps.push_pull_inplace(array, average=False, name="late")
    assert (array.read() == 5 * bps.size()).all()
    return staged(bps)


def test_operations_behind_kernels():
    assert harness.run(waits_for_kernels, workers=2, servers=1, env=direct()) == [{}] * 2


def is_refused(bps: Any, function: bytes) -> dict[str, int]:
    array = GpuArray(COUNT, "float32")
    if function:
        fake().fake_refuse(function, 801, 0)
    for _ in range(3):
        array.write(1)
        bps.push_pull_inplace(array, average=False, name="x")
        assert (array.read() == bps.size()).all()
    return staged(bps)


@pytest.mark.parametrize(
    ("function", "env", "why"),
    cases(
        [(b"cuMemGetHandleForAddressRange", {}, r"cannot make a dma-buf of \d+ bytes: .*801.*nvidia_peermem")],
        [
            (b"", {"FAKE_CUDA_FLUSHES": "0"}, "its kernels may not see what RDMA devices write"),
            (b"", {"BPS_IBVERBS_LIB": "libibverbs.so.1"}, r"cannot register \d+ bytes with "),
        ],
    ),
)
def test_what_cannot_be_registered_is_staged(function, env, why):
    """And the log says so once."""
    with harness.start(is_refused, function, workers=2, servers=1, env=direct(**env)) as job:
        for found in job.results():
            assert found["device_bytes_from"] == found["device_bytes_to"] == 3 * COUNT * 4
        for rank in ("rank 0", "rank 1"):
            said = re.findall("arrays of GPU 0 are copied through memory of the host.*", job.log(rank))
            assert len(said) == 1
            assert re.search(why, said[0]), said


def flushes(bps: Any) -> str:
    array = GpuArray(COUNT)
    before = fake().fake_flushes()
    bps.push_pull_inplace(array, average=False, name="x")
    assert fake().fake_flushes() > before
    bps.barrier()
    fake().fake_refuse(b"cuFlushGPUDirectRDMAWrites", 999, 0)
    with pytest.raises(bps.TransportError) as caught:
        bps.push_pull_inplace(array, average=False, name="x")
    bps.push_pull_inplace(array, average=False, name="x")
    return str(caught.value)


def test_the_gpu_sees_what_was_written_before_the_call_returns():
    for text in harness.run(flushes, workers=2, servers=1, env=direct()):
        assert re.search("push_pull of 'x', round 1: the GPU may not see the result that RDMA devices", text)


def goes_on_until_it_fails(bps: Any) -> tuple[str, dict[str, int]]:
    fake().fake_delay(200)
    array = GpuArray(COUNT)
    for step in range(1_000_000):
        if step == 5:
            mark("running")
        try:
            array.write(1)
            bps.push_pull_inplace(array, average=False, name="x", timeout=60)
            assert (array.read() == bps.size()).all()
        except (bps.PeerLostError, bps.RoundAbortedError) as raised:
            assert is_quiet(array)
            return str(raised), staged(bps)
    return "nothing", {}


@pytest.mark.parametrize("lost", cases(["server 1"], ["rank 1"]))
def test_a_lost_member_is_an_error_and_no_byte_changes_after_it(lost):
    with harness.start(goes_on_until_it_fails, workers=3, servers=2, env=direct(BPS_SHUTDOWN_TIMEOUT="1")) as job:
        job.await_marks("running")
        job.kill(lost)
        outcomes = job.outcomes(but=[1])[::2] if lost == "rank 1" else job.outcomes()
        for outcome in outcomes:
            assert not outcome.error, outcome.error
            text, found = outcome.value
            assert "'x'" in text  # that ends, or that does not begin any more
            assert found == {}


# ---- Rails


@pytest.mark.vm
def test_both_rails_carry_it(spare_device):
    devices = (fabric.HCA, spare_device.hca)
    before = [fabric.hardware_counters(hca)["sent_pkts"] for hca in devices]
    env = direct(BPS_RDMA_HCA=f"={fabric.HCA},{spare_device.hca}", BYTEPS_PUSH_THREAD="1")
    assert harness.run(sums_and_moves, ("float32",), workers=2, servers=1, env=env) == [{}] * 2
    sent = [fabric.hardware_counters(hca)["sent_pkts"] - b for hca, b in zip(devices, before, strict=True)]
    assert min(sent) > 3 * 30_001 * 4 // 4096


def rounds_until_told(bps: Any, folder: str) -> dict[str, Any]:
    """Sums until the file `stop` exists; for each round when it began and what each rail had sent by then."""
    bps.init()
    rank, names = bps.rank(), os.environ["BPS_RDMA_HCA"][1:].split(",")
    array, told = GpuArray(1 << 18), Path(folder, "stop")
    log = []
    try:
        for number in range(1_000_000):
            array.write(rank + number % 1000)
            log.append((time.monotonic(), {n[:-1]: fabric.hardware_counters(n).get("sent_pkts", 0) for n in names}))
            bps.push_pull_inplace(array, average=False, name="x")
            assert (array.read() == 2 * (number % 1000) + 1).all()
            assert array.is_contained()
            if rank == 0:
                Path(folder, "next").write_text(str(number))
                Path(folder, "next").rename(Path(folder, "round"))  # never seen half written
            over = bps.push_pull(np.array([float(rank == 0 and told.exists())]), average=False, name="stop")
            if over[0] > 0:
                break
        return {"log": log, "counters": bps.metrics()["total"], "registered": registered()}
    finally:
        bps.shutdown()


@pytest.fixture
def start(cables, tmp_path) -> Iterator[Start]:
    env = {"BPS_TRANSPORT": "rdma", "BPS_HEARTBEAT_TIMEOUT": str(20 * harness.PATIENCE)} | harness.cut_at(128 << 10)
    of_rank = [
        {"BPS_RDMA_HCA": "=" + ",".join(cable.ends[rank].hca for cable in cables), "BPS_INTERFACE": "lo"}
        for rank in range(2)
    ]
    with jobs(tmp_path, rounds_until_told, env=env | gpu_arrays.env_direct(), rank_env=of_rank) as begin:
        yield begin


@pytest.mark.vm
def test_a_rail_that_fails_costs_no_round(cables, start):
    running = start()
    cables[1].set_link("down")
    running.until_all_say(LOST)
    lost_at = time.monotonic()
    running.more(15)
    results = running.results()
    lost, left = (cable.ends[0].hca[:-1] for cable in (cables[1], cables[0]))
    for result in results:
        assert result["counters"]["paths_lost"] >= 1
        used = carried(result["log"], lost_at)
        assert used[lost] < used[left] / 10, "the other one carries everything"
        assert result["registered"] == 2, "with each rail once"

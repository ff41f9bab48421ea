# SPDX-License-Identifier: Apache-2.0
"""Sums that the GPUs of a host begin among themselves (BPS_GPU_HOST_SUM): each rank copies and sends its share only.

The device is simulated (simulated.py), with gloo in the place of NCCL; test_gpu.py has what takes several GPUs.
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

import gpu_arrays
import harness
import pytest
import simulated
import torch
from host_jobs import ON, TCP, on, values

import bps_rdma.torch as bps_torch
from bps_rdma import job
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch import transfer
from bps_rdma.torch.backend.work import BpsWork
from bps_rdma.torch.transfer import operation
from bps_rdma.torch.transfer.hosts import collectives, watch
from bps_rdma.torch.transfer.hosts.queue import HostOperation


def sum_in_order(tensor: torch.Tensor, name: str, op: ReduceOp = ReduceOp.sum, **options: Any) -> torch.Tensor:
    found = transfer.all_reduce(tensor, OperationOptions(op, name, **options), in_order=True).wait()
    assert isinstance(found, torch.Tensor)
    return found


# ---- Sums


@pytest.mark.parametrize("layout", ["aabb", "aab", "aaabb", "aa"])
def test_sums(layout):
    harness.run(sums_of_all_kinds, **on(layout, **TCP))


def sums_of_all_kinds(bps: Any) -> None:
    """Sizes around pieces and slices, all dtypes and reductions, with a device on which nothing happens at once."""
    device = simulated.install(delay=0.0002)
    rank, size = bps.rank(), bps.size()
    counts = (1, 5, 1024, 2048, 2049, 12_345)
    sums = [(torch.float32, ReduceOp.sum, count) for count in counts]
    sums += [(dtype, ReduceOp.sum, 3001) for dtype in (torch.int64, torch.uint8, torch.bfloat16, torch.float16)]
    sums += [(torch.float64, op, 3001) for op in (ReduceOp.min, ReduceOp.max)] + [
        (torch.float32, ReduceOp.average, 3001)
    ]
    pending = []
    computed = threading.Event()
    device.compute.put(computed.wait)
    for dtype, op, count in sums:
        every = torch.stack([values(each, count, dtype).double() for each in range(size)])
        expected = {
            ReduceOp.sum: every.sum(0), ReduceOp.min: every.amin(0), ReduceOp.max: every.amax(0),
            ReduceOp.average: every.sum(0).float().div(size).double(),
        }[op]  # fmt: skip
        tensor, mine = torch.zeros(count, dtype=dtype), values(rank, count, dtype)
        device.compute.put(lambda tensor=tensor, mine=mine: tensor.copy_(mine))
        handle = transfer.all_reduce(tensor, OperationOptions(op, f"{dtype} {op} {count}"), in_order=True)
        pending.append((handle, tensor, expected.to(dtype)))
    for _ in range(5):
        bps.barrier()  # what does not wait for the device has time to read zeros
    computed.set()
    for handle, tensor, expected in pending:
        assert handle.wait() is tensor
        device.wait(device.record(device.compute))
        assert torch.equal(tensor, expected)
    source, out = values(rank, 999), torch.zeros(999)
    options = OperationOptions(ReduceOp.sum, "out of place")
    device.wait(device.record(device.compute))
    assert transfer.all_reduce(source, options, out, in_order=True).wait() is out
    device.wait(device.record(device.compute))
    assert torch.equal(source, values(rank, 999))
    assert torch.equal(out, sum(values(each, 999) for each in range(size)))


# ---- What is copied and sent


COUNT = 48_000  # elements, which 2, 3 and 6 slices divide


@pytest.mark.parametrize(
    ("layout", "shares"), [("aabb", [2, 2, 2, 2]), ("aab", [2, 2, 1]), ("aaabb", [3, 3, 3, 2, 2]), ("aa", [0, 0])]
)
def test_bytes(layout, shares):
    """Of each tensor, a rank copies to the host, sends and copies back one of so many parts; 0: nothing."""
    counted = harness.run(bytes_of_a_sum, **on(layout, **TCP))
    for (copied, reduced), part in zip(counted, shares, strict=True):
        share = COUNT * 4 // part if part else 0
        assert copied == 2 * share
        assert share <= reduced <= share + 64  # and what tells that all are in the same call


def bytes_of_a_sum(bps: Any) -> tuple[int, int]:
    device = simulated.install(immediate=True)
    sum_in_order(torch.zeros(COUNT), "t")
    bps.barrier()
    copied, reduced = device.copied_bytes, bps.metrics()["total"]["operation_bytes"]
    assert sum_in_order(torch.ones(COUNT), "t").eq(bps.size()).all()
    bps.barrier()
    return device.copied_bytes - copied, bps.metrics()["total"]["operation_bytes"] - reduced


@harness.on_ranks(**harness.on_hosts("aab"), env={**ON, **gpu_arrays.env(), **TCP})
def test_slices_on_the_route_of_the_core(bps: Any) -> None:
    """With BPS_DEVICE_ROUTE=1 slices go that way."""
    device = simulated.install_on_route()
    before = gpu_arrays.copied(bps)
    assert sum_in_order(torch.ones(COUNT), "t").eq(bps.size()).all()
    bps.barrier()
    share = COUNT * 4 // (1 if bps.rank() == 2 else 2)
    assert gpu_arrays.copied(bps) - before == 2 * share
    assert device.copies == 0


# ---- What goes as without


@harness.on_ranks(**on("aab", **TCP, BPS_MIN_COMPRESS_BYTES="1024"))
def test_what_does_not_go_by_the_gpus(bps: Any) -> None:
    """Each of them is copied as a whole, on all ranks, and right."""
    device = simulated.install(immediate=True)
    size, count = bps.size(), 6000

    def staged(tensor: torch.Tensor, expected: float, op: ReduceOp = ReduceOp.sum, **options: Any) -> None:
        before = device.copied_bytes
        assert sum_in_order(tensor, f"{op} {tensor.dtype} {options}", op, **options).eq(expected).all()
        assert device.copied_bytes - before == 2 * tensor.nbytes

    staged(torch.full((count,), 2.0), 2.0**size, ReduceOp.product)
    staged(torch.full((count,), 2.0, dtype=torch.float16), 2.0, ReduceOp.average)
    staged(torch.full((count,), 3, dtype=torch.int64), 3, ReduceOp.average)
    staged(torch.ones(count), size, compression="exact")
    staged(torch.ones(count), size, compression="bf16")
    before = device.copied_bytes
    assert bps_torch.push_pull(torch.ones(count), "a name", average=False).eq(size).all()
    assert device.copied_bytes - before == 2 * count * 4, "nobody promises an order"
    assert sum_in_order(torch.empty(0), "empty").numel() == 0
    before = device.copied_bytes
    sum_in_order(torch.ones(count), "in the end")
    assert device.copied_bytes - before <= 2 * count * 4 * (1 if bps.rank() == 2 else 0.5), "this one does"


@harness.on_ranks(**on("aabb", **TCP, BPS_COMPRESSION="bf16", BPS_MIN_COMPRESS_BYTES="1024"))
def test_slices_are_not_compressed_where_the_whole_is_not(bps: Any) -> None:
    device = simulated.install(immediate=True)
    bps.declare("t", shape=COUNT, dtype="float32", compression=bps.Uncompressed())
    own = torch.full((COUNT,), 1 + 2.0**-20)
    assert sum_in_order(own, "t").eq(bps.size() * (1 + 2.0**-20)).all()
    assert bps.metrics()["total"]["compressed_bytes"] == 0
    assert device.copied_bytes == COUNT * 4, "half of it, down and up"


def with_and_without(bps: Any) -> int:
    device = simulated.install(immediate=True)
    assert sum_in_order(torch.ones(3000), "t").eq(bps.size()).all()
    return device.copied_bytes


@pytest.mark.parametrize("env", [{"BPS_GPU_HOST_SUM": "0"}, {"BPS_MIN_WORKERS": "1"}])
def test_jobs_without(env):
    assert harness.run(with_and_without, **on("aa", **env)) == [2 * 12_000] * 2


def sharing_a_gpu(bps: Any) -> int:
    simulated.SimulatedDevice.identity = lambda _: "the only one"  # type: ignore[method-assign]
    return with_and_without(bps)


def test_ranks_that_share_a_gpu_say_so_once():
    with harness.start(sharing_a_gpu, **on("aa")) as job:
        assert job.results() == [2 * 12_000] * 2
        assert job.report().count("BPS_GPU_HOST_SUM=1 has no effect") == 1
        assert "share a GPU" in job.report()


# ---- Orders


def in_different_orders(bps: Any) -> None:
    """Ranks 0 and 1, which are on one host, begin two sums in different orders: both fail, and their tensors stay."""
    names = ["one", "other"] if bps.rank() == 0 else ["other", "one"]
    tensors = [values(bps.rank(), 3000) for _ in names]
    first = transfer.all_reduce(tensors[0], OperationOptions(name=names[0]), in_order=True)
    with pytest.raises(bps.MismatchError):
        sum_in_order(tensors[1], names[1])
    with pytest.raises(bps.MismatchError, match="another rank of this host has begun another operation"):
        first.wait()
    for tensor in tensors:
        assert torch.equal(tensor, values(bps.rank(), 3000))


@harness.on_ranks(**on("aa"))
def test_another_order_is_refused(bps: Any) -> None:
    """On one host all ranks get the error for the same call, and go on together."""
    simulated.install(immediate=True)
    in_different_orders(bps)
    assert sum_in_order(torch.ones(3000), "one").eq(2).all()


@harness.on_ranks(**on("aabb", **TCP))
def test_another_order_on_one_of_the_hosts(bps: Any) -> None:
    """The ranks of other hosts may have summed: there is no next time."""
    simulated.install(immediate=True)
    if bps.rank() < 2:
        in_different_orders(bps)
        with pytest.raises(bps.MismatchError, match="an earlier operation of the GPUs of this host has failed"):
            sum_in_order(torch.ones(3000), "one")
        harness.mark("refused")
        harness.await_mark("refused", 0, 1)  # a rank that has left would be another reason
        return
    tensor = values(bps.rank(), 3000)
    with pytest.raises(bps.PeerLostError, match="has left the job"):
        sum_in_order(tensor, "one")
    assert torch.equal(tensor, values(bps.rank(), 3000))


@harness.on_ranks(**on("aabb", **TCP))
def test_hosts_with_different_orders_wait(bps: Any) -> None:
    """Between hosts, sums are matched by name: none meets another one, and the deadline ends them."""
    simulated.install(immediate=True)
    names = ["one", "other"] if bps.rank() < 2 else ["other", "one"]
    tensors = [values(bps.rank(), 3000) for _ in names]
    for name, tensor in zip(names, tensors, strict=True):
        with pytest.raises((bps.DeadlineError, bps.TransportError, bps.PeerLostError)):  # who comes last finds no peer
            sum_in_order(tensor, name, timeout=2.0)
        assert torch.equal(tensor, values(bps.rank(), 3000))


# ---- Errors


def without_rank_1(bps: Any) -> str:
    """Rank 1 does not come: nothing is summed, and nothing changes later."""
    simulated.install(immediate=True)
    sum_in_order(torch.ones(3000), "t")
    harness.mark("first")
    if bps.rank() == 1:
        harness.await_mark("told", 0)
        return ""
    tensor = values(bps.rank(), 3000)
    try:
        sum_in_order(tensor, "t", timeout=1.0)
    except bps.DeadlineError as error:
        assert torch.equal(tensor, values(bps.rank(), 3000))
        with pytest.raises(bps.DeadlineError, match="an earlier operation"):
            sum_in_order(tensor, "t")
        harness.mark("told")
        return str(error)
    raise AssertionError("the sum had no error")


def test_a_rank_that_does_not_come():
    told = harness.run(without_rank_1, **on("aa"))
    assert "1" in told[0]


def whose_gpu_waits(bps: Any, patience: float | None) -> str:
    """GPUs wait for each other, as they do for a lost rank: NCCL does not see that."""
    simulated.install(immediate=True)
    tensor = values(bps.rank(), 3000)
    before = tensor.clone()
    sum_in_order(torch.ones(3000), "t")
    if patience is not None:  # that of what tells that both come stays long
        operation._GRACE = patience - job.current().process.timeout_s
    aborted = threading.Event()
    collectives.HostCollectives.abort = lambda _: aborted.set()  # type: ignore[method-assign]
    collectives.HostCollectives.reduce_scatter = lambda *_: aborted.wait()  # type: ignore[method-assign, assignment]
    handle = transfer.all_reduce(tensor, OperationOptions(name="t"), in_order=True)
    pending = BpsWork("all_reduce", (handle,), (), [tensor], [tensor])  # as torch's DDP waits
    harness.mark("waits")
    with pytest.raises(RuntimeError) as caught:
        pending.get_future().wait()
    assert aborted.wait(60), "who waits for the sum may hear of the error before the GPUs are released"
    if patience is not None:  # a rank that leaves ends the sums of the others
        harness.mark("told")
        harness.await_mark("told", *range(bps.size()))
    bps.shutdown(0)
    assert torch.equal(tensor, before), "what was late has not come there"
    return str(caught.value)


def files_while_gpus_sum(bps: Any, folder: Path) -> list[str]:
    tempfile.tempdir = str(folder)
    simulated.install(immediate=True)
    sum_in_order(torch.ones(3000), "t")
    return [path.name for path in folder.iterdir()]


def test_a_rank_that_is_killed_leaves_no_file(tmp_path):
    assert harness.run(files_while_gpus_sum, tmp_path, **on("aa")) == [[], []]


def test_a_rank_that_is_killed_while_gpus_wait():
    with harness.start(whose_gpu_waits, None, **on("aa")) as job:
        job.await_marks("waits")
        job.kill("rank 1")
        assert "PeerLostError" in job.outcomes(but=[1])[0].value


def test_gpus_that_wait_for_ever():
    for told in harness.run(whose_gpu_waits, 3.0, **on("aa")):
        assert "the GPUs of this host did not end it within 3 s" in told


def with_a_rank_that_is_killed(bps: Any) -> str:
    """It has said that it comes, and goes before the GPUs have summed."""
    device = simulated.install(immediate=True)
    tensor = values(bps.rank(), 3000)
    sum_in_order(torch.ones(3000), "t")
    watch._LOOK_S = 100.0  # otherwise it may see the loss before the GPUs do
    if bps.rank() == 1:  # the stream never comes to the next sum
        stream = simulated.Stream()
        device.compute = stream
        stream.put(lambda: harness.await_mark("never"))
    handle = transfer.all_reduce(tensor, OperationOptions(name="t"), in_order=True)
    assert isinstance(handle, HostOperation)
    assert handle.same is not None
    harness.eventually(handle.same[1].done, what="what both have said")
    harness.mark("second")
    with pytest.raises((bps.TransportError, bps.PeerLostError)) as caught:
        handle.wait()
    assert torch.equal(tensor, values(bps.rank(), 3000))
    bps.shutdown(0)
    return str(caught.value)


def test_a_rank_of_the_host_that_is_killed():
    with harness.start(with_a_rank_that_is_killed, **on("aa")) as job:
        job.await_marks("second")
        job.kill("rank 1")
        told = job.outcomes(but=[1])[0].value
        assert "the GPUs of this host could not do it" in told

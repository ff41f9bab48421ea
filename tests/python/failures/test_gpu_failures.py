# SPDX-License-Identifier: Apache-2.0
"""Losses, deadlines, interrupts and failed devices while arrays of a GPU travel: errors, and arrays that stay quiet."""

import time
from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
from bodies.losses import sum_until_it_fails
from gpu_arrays import GpuArray, Kernel, fake
from harness import await_mark

from bps_rdma import Int8

COUNT = 200_000
MANY = harness.cut_at(16384)


def on_gpu(transport: str, **more: str) -> dict[str, str]:
    return harness.over(transport) | gpu_arrays.env() | MANY | more


def is_quiet(array: GpuArray) -> bool:
    """Nothing writes to it, or beside it."""
    before = array.read()
    time.sleep(0.2)  # what must not happen has had the time to
    return array.read().tobytes() == before.tobytes() and array.is_contained()


def goes_on_until_it_fails(bps: Any, error: str, compression: Any) -> str:
    """Operations of which many are under way at any time."""
    fake().fake_delay(200)
    arrays = [GpuArray(COUNT) for _ in range(4)]
    failure = sum_until_it_fails(bps, arrays, 5, compression=compression)
    assert all(is_quiet(one) for one in arrays)
    assert type(failure).__name__ == error, failure
    bps.shutdown()
    return str(failure)


@pytest.mark.parametrize(
    ("servers", "compression"), [(None, None), (2, None), (2, Int8(feedback=True, everywhere=True))]
)
def test_a_rank_is_killed(transport, servers, compression):
    env = on_gpu(transport, BPS_SHUTDOWN_TIMEOUT="1")
    body, error = goes_on_until_it_fails, "PeerLostError"
    with harness.start(body, error, compression, workers=3, servers=servers, env=env) as job:
        job.await_marks("running")
        job.kill("rank 1")
        for outcome in job.outcomes(but=[1])[::2]:
            assert not outcome.error, outcome.error
            assert "rank 1" in outcome.value or "worker 1" in outcome.value


@harness.on_ranks("transport", workers=2, env=gpu_arrays.env, interrupts=True)
def test_ctrl_c(bps: Any) -> None:
    array = GpuArray(COUNT)
    if bps.rank() == 1:
        await_mark("interrupted", 0)
    else:
        harness.is_interrupted(lambda: bps.push_pull_inplace(array, name="waits"))
        assert is_quiet(array)
    after = gpu_arrays.of(np.ones(COUNT, np.float32))
    bps.push_pull_inplace(after, average=False, name="after")
    assert (after.read() == 2).all()


@harness.on_ranks("transport", workers=2, env=lambda: gpu_arrays.env() | MANY)
def test_a_late_gpu_meets_the_deadline(bps: Any) -> None:
    """Rank 1's GPU is late: all ranks have the deadline's error, and later rounds are right."""
    array = GpuArray(COUNT, "uint8", fake().fake_stream())
    kernel = Kernel(array, 3) if bps.rank() == 1 else None
    with pytest.raises(bps.DeadlineError):
        bps.push_pull_inplace(array, name="x", timeout=1 + bps.rank())
    if kernel is not None:
        kernel.let_go()
        harness.eventually(lambda: bool((array.read() == 3).all()), what="the kernel")
    assert is_quiet(array)
    bps.barrier()
    array.write(5)
    bps.push_pull_inplace(array, average=False, name="x")
    assert (array.read() == 10).all()


def broken_gpu(bps: Any) -> str:
    array = GpuArray(COUNT, "uint8", fake().fake_stream())
    bps.push_pull_inplace(array, name="x")
    kernel = Kernel(array, 3) if bps.rank() == 1 else None
    handle = bps.push_pull_async_inplace(array, name="x")
    if kernel is not None:
        fake().fake_break()
    with pytest.raises(bps.TransportError) as caught:
        handle.wait()
    assert bps.push_pull(np.ones(5), average=False, name="host")[0] == 2, "memory of the host still travels"
    return str(caught.value)


def test_a_gpu_that_fails(transport):
    for text in harness.run(broken_gpu, workers=2, env=on_gpu(transport)):
        assert "GPU 0 has failed: an illegal memory access" in text


@harness.on_ranks("transport", workers=2, env=lambda: gpu_arrays.env() | MANY)
def test_no_own_part_is_copied_after_an_error(bps: Any) -> None:
    """A part that lies elsewhere than in `out`, behind a late kernel: no copy of it outlives the error."""
    stream = fake().fake_stream()
    part, out = GpuArray(COUNT, "uint8", stream), GpuArray(bps.size() * COUNT, "uint8", stream)
    kernel = Kernel(part, 3)
    with pytest.raises(bps.DeadlineError):
        bps.all_gather(part, "x", out=out, timeout=1)
    kernel.let_go()
    harness.eventually(lambda: bool((part.read() == 3).all()), what="the kernel")
    assert is_quiet(out)
    assert (out.read() == 0).all()


@harness.on_ranks(workers=1, env=lambda: on_gpu("shm"))
def test_gpudirect_is_not_promised_alone(bps: Any) -> None:
    bps.shutdown()
    with pytest.raises(bps.InvalidArgumentError, match="BPS_GPUDIRECT=1 has no effect without BPS_DEVICE_ROUTE=1"):
        bps.init(device_route=False, gpudirect=True)


@harness.on_ranks(workers=2, env=lambda: on_gpu("shm"))
def test_a_job_ends_although_its_gpu_hangs(bps: Any) -> None:
    array = GpuArray(COUNT, "uint8", fake().fake_stream())
    kernel = Kernel(array, 3)
    with pytest.raises(bps.DeadlineError):
        bps.push_pull_inplace(array, name="x", timeout=1)
    begin = time.monotonic()
    bps.shutdown()
    took = time.monotonic() - begin
    kernel.let_go()  # what was under way ends only now
    assert took < 20 * harness.PATIENCE

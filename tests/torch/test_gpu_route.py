# SPDX-License-Identifier: Apache-2.0
"""The core's own route of a GPU's arrays (BPS_DEVICE_ROUTE), on a real GPU and CUDA's driver.

tests/python/operations/test_device_route.py has more of it, on a fake driver.
"""

import time
from typing import Any

import harness
import pytest
import torch
from bodies.losses import sum_until_it_fails
from harness import await_mark, mark
from on_device import with_broadcasts, with_closure, with_collectives, with_ddp, with_optimizers, with_push_pull
from real_device import SMALL, on_both

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

COUNT = 3_000_001
ENV = {"BPS_DEVICE_ROUTE": "1"}
DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64")


def values(rank: int, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return torch.randint(-30, 30, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@harness.on_ranks("transport", workers=2, env=ENV)
def test_sums(bps: Any) -> None:
    rank = bps.rank()
    for name in DTYPES:
        dtype = getattr(torch, name)
        expected = values(0, dtype) + values(1, dtype)
        array = values(rank, dtype).cuda()
        handles = [bps.push_pull_async(array, average=False, name=f"{name} {i}") for i in range(4)]
        for handle in handles:
            assert torch.equal(handle.wait().cpu(), expected), name
        assert bps.push_pull_inplace(array, average=False, name=name) is array
        assert torch.equal(array.cpu(), expected), name
    found = bps.metrics()["total"]
    assert found["device_bytes_from"] > 0
    assert found["copied_bytes"] == 0, "only the GPU copies"


@pytest.mark.parametrize("body", [with_optimizers, with_closure, with_broadcasts, with_push_pull, with_collectives])
def test_faces(body):
    harness.run(on_both, body, workers=2, env=SMALL | ENV)


def test_ddp():
    harness.run(on_both, with_ddp, "bucketed", workers=2, env=SMALL | ENV)


@harness.on_ranks("transport", workers=2, env=ENV)
def test_operations_wait_for_kernels_before_them(bps: Any) -> None:
    """Kernels that take their time before, in streams of their own; the results are used at once."""
    rank, slow = bps.rank(), torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for step in range(12):
        with torch.cuda.stream(streams[step % 3]):
            for _ in range(10):
                slow = slow @ slow / 64
            tensor = values(rank + 10 * step, torch.float32).cuda(non_blocking=True)
            handle = bps.push_pull_async(tensor * 2, average=False, name=f"stream {step % 3}")
            del tensor  # torch's allocator may give its memory to the next step
            results.append(handle.wait() + 1)
    for step, result in enumerate(results):
        expected = 2 * (values(10 * step, torch.float32) + values(1 + 10 * step, torch.float32)) + 1
        assert torch.equal(result.cpu(), expected), step


@harness.on_ranks("transport", workers=2, env=ENV | {"BPS_SHUTDOWN_TIMEOUT": "1"}, kills="rank 1")
def test_a_rank_that_dies(bps: Any) -> None:
    """Rank 1 is killed in the middle of things; what rank 0 has does not change any more."""
    arrays = [torch.zeros(COUNT, device="cuda") for _ in range(4)]
    assert isinstance(sum_until_it_fails(bps, arrays, 3), bps.PeerLostError)
    seen = [one.clone() for one in arrays]
    time.sleep(2)  # what must not happen has had the time to
    assert all(torch.equal(*pair) for pair in zip(seen, arrays, strict=True))
    bps.shutdown()


@harness.on_ranks(workers=2, env=ENV)
def test_a_late_gpu_meets_the_deadline(bps: Any) -> None:
    """Rank 1's GPU is late, and rank 0 has a deadline; the next round is right."""
    array = torch.zeros(COUNT, device="cuda")
    if bps.rank() == 1:
        torch.cuda._sleep(5_000_000_000)  # cycles: seconds
    with pytest.raises(bps.DeadlineError):
        bps.push_pull_inplace(array, name="x", timeout=0.5)
    torch.cuda.synchronize()
    mark("late")
    await_mark("late", 0, 1)
    array.fill_(2)
    bps.push_pull_inplace(array, average=False, name="x")
    assert array.eq(4).all()

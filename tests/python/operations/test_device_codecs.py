# SPDX-License-Identifier: Apache-2.0
"""Compressed sums of a GPU's arrays by the core's own route, on a fake driver: the bits of arrays in CPU memory."""

import hashlib
from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
from gpu_arrays import GpuArray, fake
from reference.codecs import METHODS

from bps_rdma.compression import Compression, Registered, register

COUNT = 20_001
SMALL = {"BPS_STAGING_BYTES": "65536"} | harness.cut_at(16384)  # many partitions, and few buffers
REFUSED = {"BPS_FAULT": "refuse=0.2,partial=0.4,hold=0.3,seed=5"}  # what is encoded is often sent later
MORE = ("", "feedback=1", "feedback=1,momentum=0.5")


def drawn(rank: int, step: int, dtype: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(10 * step + rank).standard_normal(COUNT).astype(dtype)


def sums(bps: Any, on_gpu: list[int]) -> dict[str, str]:
    """Digests of what all codecs give, all at once in each step; the arrays of the ranks `on_gpu` are on one."""
    rank, size = bps.rank(), bps.size()
    is_on_gpu, found = rank in on_gpu, {}
    begin, end = bps.shard_bounds(COUNT, size, rank)
    if is_on_gpu:
        fake().fake_delay(50)

    def placed(values: np.ndarray[Any, Any]) -> Any:
        return gpu_arrays.of(values) if is_on_gpu else values.copy()

    def digest(array: Any) -> str:
        assert not is_on_gpu or array.is_contained()
        return hashlib.sha256((array.read() if is_on_gpu else array).tobytes()).hexdigest()

    def how(text: str) -> Compression:
        return Compression.from_text(f"{text}{',' if ':' in text else ':'}everywhere=1")

    texts = [f"{method}:{more}".rstrip(":") for method in METHODS for more in MORE]
    prepared = [placed(np.zeros(COUNT, np.float32)) for _ in texts]
    operations = [
        bps.prepare("push_pull", array, f"prepared {text}", compression=how(text))
        for text, array in zip(texts, prepared, strict=True)
    ]
    for step in range(3):
        handles = {}
        for dtype in ("float32", "float16"):
            values = drawn(rank, step, dtype)
            for text in texts:
                name = f"{text} {dtype}"
                own, part = placed(values), placed(values[begin:end])
                handles[name] = bps.push_pull_async_inplace(
                    own, name=name, compression=how(text), priority=len(text) % 3
                )
                handles[f"part {name}"] = bps.reduce_scatter_async(
                    placed(values), f"part {name}", out=part, compression=how(text)
                )
        found |= {f"{name}, {step}": digest(handle.wait()) for name, handle in handles.items()}
        for text, operation, array in zip(texts, operations, prepared, strict=True):
            if is_on_gpu:
                array.write(drawn(rank, step, "float32"))
            else:
                array[:] = drawn(rank, step, "float32")
            found[f"prepared {text}, {step}"] = digest(operation())
    counted = bps.metrics()["total"]
    assert (counted["device_bytes_from"] > 0) == is_on_gpu
    assert counted["compressed_bytes"] > 0
    return found


WHERE = {"workers": {"workers": 2}, "servers": {"workers": 2, "servers": 2}}


@pytest.mark.parametrize("where", [*WHERE])
def test_every_codec_gives_the_bits_that_it_gives_in_cpu_memory(transport, where):
    env = harness.over(transport) | gpu_arrays.env() | SMALL | REFUSED
    expected = harness.run(sums, [], **WHERE[where], env=env)
    for on_gpu in ([0, 1], [1]) if where == "workers" else ([0, 1],):
        assert harness.run(sums, on_gpu, **WHERE[where], env=env) == expected


def test_hosts_that_sum_before_they_compress():
    env = gpu_arrays.env() | SMALL | {"BPS_TRANSPORT": "shm,tcp"}
    expected = harness.run(sums, [], **harness.on_hosts("aab"), env=env)
    assert harness.run(sums, [0, 1, 2], **harness.on_hosts("aab"), env=env) == expected


@pytest.mark.parametrize("function", ["encode", "decode"])
@harness.on_ranks("transport", workers=2, env=lambda: gpu_arrays.env() | SMALL)
def test_a_codec_that_fails(bps: Any, function: str) -> None:
    """A codec fails on rank 0: everybody is told, no array changes after that, and the next sum is right."""
    fails = [bps.rank() == 0]

    def encode(array: np.ndarray[Any, Any], _: int) -> bytes:
        if function == "encode" and fails[0]:
            raise ZeroDivisionError
        return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def decode(code: np.ndarray[Any, Any], _: int) -> np.ndarray[Any, Any]:
        if function == "decode" and fails[0]:
            raise ZeroDivisionError
        return (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    register("cut", encode, decode, block=1, block_bytes=2)
    bps.barrier()  # a server refuses what was encoded by a method that it does not know yet
    cutting = Registered(method="cut", everywhere=True, feedback=True)
    array, later = GpuArray(COUNT), GpuArray(COUNT)
    array.write(3)
    fake().fake_delay(200)
    with pytest.raises(bps.InvalidArgumentError, match=rf"{function}\(\) of the codec 'cut' raised"):
        bps.push_pull_inplace(array, name="x", average=False, compression=cutting)
    before = array.read()
    bps.push_pull_inplace(later, name="later")  # by the same copies and connections, behind what was under way
    assert np.array_equal(array.read(), before)
    bps.barrier()
    fails[0] = False
    bps.barrier()
    array.write(bps.rank() + 1)
    bps.push_pull_inplace(array, name="x", average=False, compression=cutting)
    assert (array.read() == 3).all()
    assert array.is_contained()

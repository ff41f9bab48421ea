# SPDX-License-Identifier: Apache-2.0
"""Arrays of a GPU that only speak DLPack, on the fake driver: sums, order, lifetime, and what is refused.

The capsules are numpy's, whose tensors are said to lie on the GPU.
"""

import ctypes
import gc
import weakref
from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
from gpu_arrays import GpuArray, Kernel, fake
from reference.values import NUMPY_DTYPES, pushed, summed

COUNT = 30_001
LEGACY = 1


@pytest.fixture
def env() -> dict[str, str]:
    return harness.over("shm") | gpu_arrays.env()


class Exporter:
    """An array of a GPU with nothing but DLPack.

    Attributes:
        is_old: it is from before version 1 of DLPack.
        change: what the tensor of the next capsules says otherwise: offset in bytes -> (type, value).
        streams: those in which callers have said that they would use it.
        exported: what numpy keeps alive for each capsule.
    """

    def __init__(self, array: GpuArray, is_old: bool = False, device: int = 2) -> None:
        self.array, self.is_old, self.device = array, is_old, device
        self.dtype = array.dtype
        self.host = np.zeros(array.shape, array.dtype)
        self.change: dict[int, tuple[Any, int]] = {}
        self.streams: list[Any] = []
        self.exported: list[weakref.ref[Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self.is_old and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.streams.append(stream)
        if self.array.stream is not None:
            self._let_wait(stream)
        view = self.host.view(Told)
        self.exported.append(weakref.ref(view))
        capsule = view.__dlpack__(**options)
        is_versioned = "dltensor_versioned" in repr(capsule)
        assert is_versioned != self.is_old
        pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        at = pointer_in(capsule, b"dltensor_versioned" if is_versioned else b"dltensor")
        at += 32 if is_versioned else 0  # behind version, context, deleter and flags
        changes = {0: (ctypes.c_uint64, self.array.address), 8: (ctypes.c_int32, 2)} | self.change
        for offset, (kind, value) in changes.items():
            kind.from_address(at + offset).value = value
        return capsule

    def _let_wait(self, stream: Any) -> None:
        """What is put into the stream from now on waits for what is in that of the array."""
        context, event = ctypes.c_void_p(), ctypes.c_void_p()
        for status in (
            fake().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            fake().cuCtxPushCurrent_v2(context),
            fake().cuEventCreate(ctypes.byref(event), 0),
            fake().cuEventRecord(event, ctypes.c_void_p(self.array.stream)),
            fake().cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0),
            fake().cuCtxPopCurrent_v2(ctypes.byref(context)),
        ):
            assert status == 0

    @property
    def in_use(self) -> int:
        gc.collect()
        return sum(view() is not None for view in self.exported)


class Told(np.ndarray):  # type: ignore[type-arg]
    """A view that tells of its end."""


def exporter(values: Any, is_old: bool = False, stream: int | None = None) -> Exporter:
    return Exporter(gpu_arrays.of(values, stream), is_old)


@harness.on_ranks("env", workers=2)
def test_sums(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for dtype in NUMPY_DTYPES:
        mine, total = pushed(COUNT, dtype, rank, 0), summed(COUNT, dtype, range(size), 0)
        array = exporter(mine)
        assert bps.push_pull_inplace(array, average=False, name=f"in place {dtype}") is array
        assert np.array_equal(array.array.read(), total)
        assert array.streams == [LEGACY]
        assert array.in_use == 0, "the object has been told that its memory is no longer used"
    begin, end = bps.shard_bounds(COUNT, size, rank)
    whole, part = exporter(mine), exporter(np.zeros(end - begin, dtype))
    bps.reduce_scatter(whole, "s", average=False, out=part)
    assert np.array_equal(part.array.read(), total[begin:end])
    bps.all_gather(part, "g", out=whole)
    assert np.array_equal(whole.array.read(), total)
    half = exporter(np.arange(100, dtype=np.uint16))
    half.change = {20: (ctypes.c_uint8, 4)}  # bfloat16: values that are their own sums
    half.array.write(0)
    assert bps.push_pull_inplace(half, average=False, name="half") is half
    shifted = exporter(np.arange(100, dtype=np.float32))
    shifted.change = {0: (ctypes.c_uint64, shifted.array.address - 16), 40: (ctypes.c_uint64, 16)}
    bps.push_pull_inplace(shifted, average=False, name="shifted")
    assert np.array_equal(shifted.array.read(), size * np.arange(100))
    assert all(one.array.is_contained() for one in (whole, part, half, shifted))


@harness.on_ranks("env", workers=2)
def test_what_would_not_reach_the_array_is_not_written(bps: Any) -> None:
    """An object from before version 1 cannot say that it may not be written to, and is read only. So is a copy."""
    old, copy = exporter(np.ones(100, np.uint8), is_old=True), exporter(np.ones(100, np.uint8))
    copy.change = {-8: (ctypes.c_uint64, 2)}  # the flags, in front of the tensor
    out = exporter(np.zeros(200, np.uint8))
    for one in (old, copy):
        with pytest.raises(bps.InvalidTensorError, match="read-only"):
            bps.push_pull_inplace(one, name="in place")
        bps.all_gather(one, "g", out=out)
        assert (out.array.read() == 1).all()
        out.array.write(0)


@harness.on_ranks("env", workers=2)
def test_order(bps: Any) -> None:
    """The sum is that of what a kernel in another stream makes, also of a prepared operation, at each of its starts."""
    array = exporter(np.zeros(1000, np.uint8), stream=fake().fake_stream())
    kernel = Kernel(array.array, 3)
    handle = bps.push_pull_async_inplace(array, average=False, name="x")
    bps.barrier()
    assert not handle.done()
    assert array.in_use == 1
    kernel.let_go()
    handle.wait()
    assert (array.array.read() == 3 * bps.size()).all()
    prepared = bps.prepare("push_pull", array, "x", average=False)
    for round_ in range(3):
        kernel = Kernel(array.array, round_ + 1)
        handle = prepared.start()
        bps.barrier()
        assert not handle.done()
        kernel.let_go()
        handle.wait()
        assert (array.array.read() == (round_ + 1) * bps.size()).all()
    assert set(array.streams) == {LEGACY}
    del prepared, handle
    assert array.in_use == 0


@harness.on_ranks("env", workers=2)
def test_what_is_refused(bps: Any) -> None:
    array = exporter(np.zeros((10, 10), np.float32))

    def refused(words: str, call: Any) -> None:
        with pytest.raises(bps.InvalidTensorError, match=words) as caught:
            call()
        assert caught.value.hint

    def in_place() -> None:
        bps.push_pull_inplace(array, name="x")

    for change, words in (
        ({0: (ctypes.c_uint64, array.host.ctypes.data)}, "says that it is on a GPU"),
        ({20: (ctypes.c_uint8, 5)}, "dtype 5 of 32 bits, in DLPack's numbers, is not supported"),
        ({22: (ctypes.c_uint16, 4)}, "is not supported"),
        ({-8: (ctypes.c_uint64, 1)}, "read-only"),
        ({-32: (ctypes.c_uint32, 2)}, "version 2 of DLPack"),
    ):
        array.change = change
        refused(words, in_place)
    array.change = {}
    array.host = np.zeros((20, 10), np.float32)[::2]
    refused("not contiguous", in_place)
    array.host = np.zeros((10, 10), np.float32)
    refused("has no empty_like", lambda: bps.push_pull(array, name="x"))
    refused("memory of a GPU", lambda: bps.send(array, dst=1 - bps.rank()))
    managed = Exporter(array.array, device=13)
    bps.push_pull_inplace(managed, average=False, name="x")
    assert (array.array.read() == 0).all()
    assert array.in_use == 0


class Refuses:
    """As an array of JAX on several devices."""

    def __init__(self, device: tuple[int, int] | None) -> None:
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device is None:
            raise BufferError("it lies on several devices")
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("it lies on several devices")


@harness.on_ranks("env", workers=1)
def test_an_object_that_refuses(bps: Any) -> None:
    for device in ((2, 0), None):
        with pytest.raises(bps.InvalidTensorError, match="this Refuses cannot be accessed: it lies on several devices"):
            bps.push_pull_inplace(Refuses(device), name="x")


@harness.on_ranks(workers=1, env=lambda: gpu_arrays.env() | {"BPS_DEVICE_ROUTE": "0"})
def test_off_by_default(bps: Any) -> None:
    with pytest.raises(bps.InvalidTensorError, match="memory of a GPU") as caught:
        bps.push_pull_inplace(exporter(np.zeros(100, np.float32)), name="x")
    assert "BPS_DEVICE_ROUTE=1" in caught.value.hint

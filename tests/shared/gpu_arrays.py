# SPDX-License-Identifier: Apache-2.0
"""Arrays on the device of the fake driver (tests/cpp/device/fake_cuda.h), and the driver itself, compiled at first use.

The processor faults where their memory is shown, so that nothing but copies of the driver reaches it.
"""

import ctypes
import functools
import hashlib
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parents[2]
_GUARD = 4096  # bytes on each side
_CANARY = 0xCA


def driver() -> str:
    """Path of the fake driver."""
    return _compiled("fake_cuda", "tests/cpp/device/fake_cuda.h", "csrc/device/cuda.h")


def verbs() -> str:
    """Path of the library of verbs that can register this device's memory; see tests/cpp/device/fake_verbs.cc."""
    return _compiled("fake_verbs", libraries=("-Wl,--no-as-needed", "-libverbs"))


def _compiled(name: str, *headers: str, libraries: tuple[str, ...] = ()) -> str:
    source = _ROOT / f"tests/cpp/device/{name}.cc"
    content = b"".join(path.read_bytes() for path in [source, *(_ROOT / one for one in headers)])
    made = _ROOT / "build/ci" / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        own = made.with_suffix(f".{os.getpid()}")
        words = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{_ROOT / 'csrc'}"]
        words += [f"-I{_ROOT / 'tests/cpp'}", str(source), "-o", str(own), *libraries]
        subprocess.run(words, check=True)
        own.replace(made)
    return str(made)


def env() -> dict[str, str]:
    """The environment of a job whose ranks have this device."""
    return {"BPS_DEVICE_ROUTE": "1", "BPS_CUDA_LIB": driver()}


def env_direct() -> dict[str, str]:
    """The same, where RDMA devices reach it themselves."""
    return env() | {"BPS_GPUDIRECT": "1", "BPS_IBVERBS_LIB": verbs()}


def registered() -> int:
    """How often this process has registered memory of the device with an RDMA device."""
    return int(ctypes.CDLL(os.environ["BPS_IBVERBS_LIB"]).fake_registered())


def copied(bps: Any) -> int:
    """Bytes that GPUs have copied for the core, in both directions."""
    found = bps.metrics()["total"]
    return int(found["device_bytes_from"] + found["device_bytes_to"])


@functools.cache
def fake() -> Any:
    """The driver of this process, with what it has for tests."""
    library = ctypes.CDLL(os.environ["BPS_CUDA_LIB"])
    library.fake_allocate.restype = library.fake_stream.restype = ctypes.c_void_p
    library.fake_allocate.argtypes = [ctypes.c_size_t]
    library.fake_free.argtypes = [ctypes.c_void_p]
    library.fake_read.argtypes = library.fake_write.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    kernel = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
    library.fake_kernel.argtypes = kernel
    library.fake_begin_capture.argtypes = [ctypes.c_void_p]
    library.fake_refuse.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    return library


class GpuArray:
    """An array with __cuda_array_interface__, zeroed, between canaries.

    Attributes:
        stream: in which it is made; None: the legacy default stream.
        changes: what the interface says otherwise.
    """

    def __init__(self, shape: int | tuple[int, ...], dtype: Any = "float32", stream: int | None = None) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.stream = stream
        self.changes: dict[str, Any] = {}
        self._all = fake().fake_allocate(self.nbytes + 2 * _GUARD)
        self._write(0, np.full(self.nbytes + 2 * _GUARD, _CANARY, np.uint8))
        self.write(np.zeros(self.shape, self.dtype))

    def __del__(self) -> None:
        if hasattr(self, "_all"):
            fake().fake_free(self._all)

    @property
    def address(self) -> int:
        return int(self._all) + _GUARD

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found = {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3}
        return found | ({"stream": self.stream} if self.stream is not None else {}) | self.changes

    def write(self, values: Any) -> None:
        """Fills it at once, as no kernel does."""
        self._write(_GUARD, np.ascontiguousarray(np.broadcast_to(np.asarray(values, self.dtype), self.shape)))

    def read(self) -> np.ndarray[Any, Any]:
        return self._read(_GUARD, self.nbytes).view(self.dtype).reshape(self.shape)

    def is_contained(self) -> bool:
        """Whether nothing beside it has been written to."""
        sides = (self._read(0, _GUARD), self._read(_GUARD + self.nbytes, _GUARD))
        return all(bool((side == _CANARY).all()) for side in sides)

    def _write(self, at: int, values: np.ndarray[Any, Any]) -> None:
        fake().fake_write(self._all + at, values.ctypes.data, values.nbytes)

    def _read(self, at: int, nbytes: int) -> np.ndarray[Any, Any]:
        found = np.empty(nbytes, np.uint8)
        fake().fake_read(self._all + at, found.ctypes.data, nbytes)
        return found


def of(values: Any, stream: int | None = None) -> GpuArray:
    """An array with the values of one of numpy's."""
    found = GpuArray(values.shape, values.dtype, stream)
    found.write(values)
    return found


def empty(shape: int | tuple[int, ...], dtype: Any) -> GpuArray:
    return GpuArray(shape, dtype)


def empty_like(array: GpuArray) -> GpuArray:
    return GpuArray(array.shape, array.dtype)


class Kernel:
    """Work in a stream that writes a byte to all of an array once it is let go."""

    def __init__(self, array: GpuArray, byte: int) -> None:
        self._gate = ctypes.c_uint32(0)
        fake().fake_kernel(array.stream, array.address, byte, array.nbytes, ctypes.addressof(self._gate))

    def let_go(self) -> None:
        self._gate.value = 1

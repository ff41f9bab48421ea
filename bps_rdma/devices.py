# SPDX-License-Identifier: Apache-2.0
"""Arrays in the memory of a GPU, as the core's own route takes them: BPS_DEVICE_ROUTE, see docs/choose.md.

These are objects with `__cuda_array_interface__`, such as CuPy's arrays, or with DLPack, and CUDA tensors of torch. The
work that makes an array is in a stream: the one that the interface names, or else the legacy default stream, which with
DLPack the object lets wait; of torch, the stream in which the calling thread computes. The core waits for what is in it
when the operation starts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bps_rdma import _core, arrays
from bps_rdma.dlpack import LEGACY_STREAM, Exported
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.views import current


class _Kept:
    """An array, its shape, which not every class has as an attribute, and where its memory was when it was described.

    Unlike that of the host, this memory may be given back while the array lives: torch's `tensor.data = other` does.
    """

    def __init__(self, array: Any, shape: tuple[int, ...], address: int, exported: Exported | None = None) -> None:
        self.array = array
        self.shape = shape
        self.address = address
        self.exported = exported  # by DLPack


def are_carried() -> bool:
    """Whether the core carries the arrays of GPUs in this job."""
    return current().cuda_library is not None


def has(array: Any) -> bool:
    """Whether this is an array in the memory of a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return bool(array.is_cuda)
    return arrays.is_on_gpu(array)


def describe(array: Any, writable: bool) -> arrays.Memory:
    """Describes the memory of an array, as arrays.describe() does.

    Raises:
        InvalidTensorError: as arrays.describe(); or the route is off. TransportError: there is no driver.
    """
    if not are_carried():
        raise InvalidTensorError(
            f"the {type(array).__name__} is in the memory of a GPU",
            "copy it to the CPU first, or set BPS_DEVICE_ROUTE=1 in all processes of the job",
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        dtype = arrays.check_dense(array)
        address, _ = arrays.check_values(array)
        return _on_device(_Kept(array, tuple(array.shape), address), dtype)
    if not hasattr(array, "__cuda_array_interface__"):
        return _describe_exported(array, writable)
    interface = array.__cuda_array_interface__
    shape, (address, is_read_only) = tuple(interface["shape"]), interface["data"]
    own = getattr(array, "dtype", None)  # the interface cannot say bfloat16
    dtype = arrays.core_dtype(own if isinstance(own, np.dtype) else interface["typestr"])
    contiguous = _is_contiguous(shape, interface.get("strides"), arrays.size_of(dtype))
    _check(shape, contiguous and interface.get("mask") is None, writable and is_read_only)
    return _on_device(_Kept(array, shape, address), dtype)


def _describe_exported(array: Any, writable: bool) -> arrays.Memory:
    exported = Exported(array)
    _check(exported.shape, _is_contiguous(exported.shape, exported.strides, 1), writable and exported.is_read_only)
    return _on_device(_Kept(array, exported.shape, exported.address, exported), exported.dtype, LEGACY_STREAM)


def _check(shape: tuple[int, ...], is_contiguous: bool, is_refused: bool) -> None:
    if not is_contiguous:
        raise InvalidTensorError(f"the array of shape {shape} is not contiguous", "pass a contiguous copy of it")
    if is_refused:
        raise InvalidTensorError(*arrays.READ_ONLY)


def _is_contiguous(shape: tuple[int, ...], strides: Sequence[int] | None, width: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = width
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def _stream_of(kept: _Kept) -> int:
    """The stream in which an array is made and used now; a prepared operation asks at each start.

    Raises:
        InvalidArgumentError: the array has other memory than when it was described.
    """
    array, torch = kept.array, sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        address, stream = array.data_ptr(), torch.cuda.current_stream(array.device).cuda_stream
    elif kept.exported is not None:
        kept.exported = Exported(array)
        address, stream = kept.exported.address, LEGACY_STREAM
    else:
        interface = array.__cuda_array_interface__
        address, stream = interface["data"][0], interface.get("stream")
    if address != kept.address:
        raise InvalidArgumentError(
            f"the array of shape {kept.shape} has other memory than when its operation was prepared",
            "prepare the operation again",
        )
    return stream or LEGACY_STREAM


_core.register_stream_of(_stream_of)


def _on_device(kept: _Kept, dtype: _core.Dtype, stream: int | None = None) -> arrays.Memory:
    """Describes it; `stream`: see _stream_of(), which asks otherwise."""
    count = math.prod(kept.shape)
    if count == 0:
        return arrays.Memory(kept, 0, 0, 0, dtype, kept, 0, 0)
    library = current().cuda_library
    assert library is not None
    nbytes = count * arrays.size_of(dtype)
    stream = _stream_of(kept) if stream is None else stream
    found = _core.describe_on_device(library, kept, kept.address, count, nbytes, dtype, stream)
    if found is None:
        raise InvalidTensorError(
            f"the {type(kept.array).__name__} of shape {kept.shape} says that it is on a GPU, and is not",
            "pass an array that lies in the memory of a GPU, or a copy in CPU memory",
        )
    return found

# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU that an object describes by DLPack, https://dmlc.github.io/dlpack/latest/python_spec.html.

The object is asked for a capsule and told in which stream its memory will be used; it lets that stream wait for the
work that makes the array. The capsule is kept and not consumed: its end tells the object that it is no longer used.
"""

from __future__ import annotations

import ctypes
from typing import Any

from bps_rdma import _core
from bps_rdma.errors import InvalidTensorError

LEGACY_STREAM = 1  # CUDA's number for the legacy default stream, and DLPack's
_ON_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
_NOT_TO_WRITE = 1 | 2  # DLPACK_FLAG_BITMASK_READ_ONLY, and _IS_COPIED: what is written does not reach the array
_DTYPES = {  # (code, bits)
    (2, 32): _core.Dtype.float32,
    (2, 64): _core.Dtype.float64,
    (2, 16): _core.Dtype.float16,
    (4, 16): _core.Dtype.bfloat16,
    (1, 8): _core.Dtype.uint8,
    (0, 8): _core.Dtype.int8,
    (0, 32): _core.Dtype.int32,
    (0, 64): _core.Dtype.int64,
    (6, 8): _core.Dtype.bool,
}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned. The older DLManagedTensor begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)


def is_on_gpu(array: Any) -> bool:
    """Whether an object says by DLPack that it is in the memory of a GPU of CUDA."""
    try:
        return hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) in _ON_GPU
    except (BufferError, RuntimeError, TypeError, ValueError):  # it is on several, or on none
        return False


class Exported:
    """Memory of an array, which the legacy default stream may use.

    Attributes:
        address, shape, strides: of the array; the strides in elements, None: it is contiguous.
        is_read_only: it may not be written to, or is a copy. So is one from before version 1, which cannot say so.

    Raises:
        InvalidTensorError: the object refuses, or gives what DLPack does not know.
    """

    def __init__(self, array: Any) -> None:
        try:
            self._capsule = _export(array)
            name = _name_of(self._capsule)
            versioned = name == b"dltensor_versioned"
            at = _pointer_in(self._capsule, name if versioned else b"dltensor")
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidTensorError(
                f"the memory of this {type(array).__name__} cannot be accessed: {error}", "copy it to the CPU first"
            ) from error
        self.is_read_only = True
        tensor = _Tensor.from_address(at)
        if versioned:
            managed = _Versioned.from_address(at)
            if managed.major != 1:
                raise InvalidTensorError(
                    f"the {type(array).__name__} speaks version {managed.major} of DLPack", "copy it to the CPU first"
                )
            tensor, self.is_read_only = managed.tensor, bool(managed.flags & _NOT_TO_WRITE)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.shape = tuple(tensor.shape[: tensor.ndim])
        self.strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
        self._dtype = tensor.code, tensor.bits, tensor.lanes

    @property
    def dtype(self) -> _core.Dtype:
        """The core's dtype; InvalidTensorError: it has none."""
        code, bits, lanes = self._dtype
        found = _DTYPES.get((code, bits)) if lanes == 1 else None
        if found is None:
            raise InvalidTensorError(
                f"dtype {code} of {bits} bits, in DLPack's numbers, is not supported",
                f"use one of {', '.join(dtype.name for dtype in _DTYPES.values())}",
            )
        return found


def _export(array: Any) -> Any:
    try:
        return array.__dlpack__(stream=LEGACY_STREAM, max_version=(1, 0))
    except TypeError:  # from before version 1
        return array.__dlpack__(stream=LEGACY_STREAM)

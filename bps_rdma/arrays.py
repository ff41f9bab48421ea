# SPDX-License-Identifier: Apache-2.0
"""The address, size and dtype of an array, as the core needs them; and new arrays.

describe() takes numpy arrays, CPU torch tensors (when torch is imported), and anything with DLPack on the CPU or with
the buffer protocol. It copies nothing.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bps_rdma import _core, argument_types, dlpack
from bps_rdma.errors import InvalidTensorError, TransportError

Dtype = _core.Dtype
Memory = _core.Memory

NUMPY_DTYPES: dict[str, Any] = {
    "float32": Dtype.float32,
    "float64": Dtype.float64,
    "float16": Dtype.float16,
    "bfloat16": Dtype.bfloat16,  # ml_dtypes'
    "uint8": Dtype.uint8,
    "int8": Dtype.int8,
    "int32": Dtype.int32,
    "int64": Dtype.int64,
    "bool": Dtype.bool,
}
READ_ONLY = ("the array is read-only", "pass an array that can be written to; push_pull() leaves its array as it is")
FLOATING = (Dtype.float32, Dtype.float64, Dtype.float16, Dtype.bfloat16)


def describe(array: Any, writable: bool) -> Memory:
    """Describes the memory of an array without copying it.

    Args:
        array: see above.
        writable: whether the core will write to it.

    Raises:
        InvalidTensorError: its type, dtype or device is not supported; it is not contiguous; it is read-only, and
            `writable` is True.
    """
    memory = _core.describe_array(array, writable)  # numpy arrays need no more
    if memory is not None:
        return memory
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return describe_torch(array, keep=array)
    return _describe_numpy(_as_numpy(array), writable)


def core_dtype(dtype: Any) -> Dtype:
    """The core's dtype for what callers call one: a name, a dtype of numpy or torch, a type of Python.

    Raises:
        InvalidTensorError: there is no such dtype, or it is not supported.
    """
    if dtype == "bfloat16" or type(dtype).__module__ == "torch":
        return _core_dtype(dtype)  # type: ignore[no-any-return]
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise InvalidTensorError(f"{dtype!r} is not a dtype", f"use one of {', '.join(NUMPY_DTYPES)}") from None
    return _core_dtype(found)  # type: ignore[no-any-return]


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Numpy's dtype for what core_dtype() takes.

    Raises:
        InvalidTensorError: as core_dtype(); or it is bfloat16, and the package ml_dtypes, which has it, is missing.
    """
    found = core_dtype(dtype)
    if found != Dtype.bfloat16:
        return np.dtype(found.name)
    try:
        bfloat16: Any = importlib.import_module("ml_dtypes").bfloat16
    except ModuleNotFoundError:
        raise InvalidTensorError(
            "numpy has no bfloat16 without the package ml_dtypes",
            "pip install ml_dtypes, or view bytes: "
            "torch.from_numpy(bps_rdma.empty(2 * n, 'uint8')).view(torch.bfloat16)",
        ) from None
    half: np.dtype[Any] = np.dtype(bfloat16)
    return half


@functools.cache  # numpy builds the name on every access, which takes 20 µs
def _core_dtype(dtype: Any) -> Any:
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    found = NUMPY_DTYPES.get(name)
    if found is not None and not getattr(dtype, "isnative", True):
        raise InvalidTensorError(
            f"dtype {dtype} is not supported: its bytes are in the other order", f"pass array.astype({name!r})"
        )
    if found is None:
        raise InvalidTensorError(f"dtype {dtype} is not supported", f"use one of {', '.join(NUMPY_DTYPES)}")
    return found


def empty_like(array: Any) -> Any:
    """A new array of the same type, shape and dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.empty_like(array, requires_grad=False)
    if is_on_gpu(array):
        return _makers(array).empty_like(array)
    return np.empty_like(_as_numpy(array))


def is_on_gpu(array: Any) -> bool:
    """Whether an object that is no tensor of torch has its memory on a GPU only."""
    if isinstance(array, np.ndarray):  # numba maps arrays to GPUs
        return False
    return hasattr(array, "__cuda_array_interface__") or dlpack.is_on_gpu(array)


def size_of(dtype: Dtype) -> int:
    """Bytes of an element."""
    return 2 if dtype == Dtype.bfloat16 else np.dtype(dtype.name).itemsize


def _makers(array: Any) -> Any:
    """The module that makes arrays like this one, which is on a GPU: of CuPy's, cupy."""
    name = type(array).__module__.partition(".")[0]
    module = sys.modules.get(name)
    if not hasattr(module, "empty_like"):
        raise InvalidTensorError(
            f"{name} has no empty_like(), which could make another {type(array).__name__} for the result",
            "use push_pull_inplace(), or pass `out`",
        )
    return module


def empty_flat(array: Any, shape: tuple[int, ...]) -> Any:
    """A new array of the same type and dtype, with another shape."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch.empty(shape, dtype=array.dtype, device=array.device)
    if is_on_gpu(array):
        return _makers(array).empty(shape, dtype=array.dtype)
    return np.empty(shape, dtype=_as_numpy(array).dtype)


def bytes_of(array: Any) -> np.ndarray[Any, Any]:
    """The memory of a contiguous array as a flat array of bytes."""
    return _as_numpy(array).reshape(-1).view(np.uint8)


@functools.cache  # as _core_dtype()
def name_of(dtype: Any) -> str:
    """The name of a dtype of torch."""
    return str(dtype).removeprefix("torch.")


def describe_bytes(tensor: Any) -> Memory:
    """Describes the memory of a torch tensor of any dtype as bytes, for operations that only move it.

    Raises:
        InvalidTensorError: as describe(); or it is a view of conjugate values.
    """
    if not (tensor.is_cpu and tensor.layout is sys.modules["torch"].strided and tensor.is_contiguous()):
        return describe_torch(tensor, keep=tensor)  # which refuses it
    if tensor.is_conj():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is a view of conjugate values", "pass tensor.resolve_conj()"
        )
    address, storage = check_values(tensor)
    nbytes = tensor.numel() * tensor.itemsize
    return Memory(tensor, address, nbytes, nbytes, Dtype.uint8, storage, storage.data_ptr(), storage.nbytes())


def shape_of(array: Any) -> tuple[int, ...]:
    """The shape of an array; (1,) of a single number."""
    return tuple(array.shape if hasattr(array, "shape") else _as_numpy(array).shape) or (1,)


def flat(array: Any) -> Any:
    """A contiguous array as one of a single dimension, on the same memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach().view(-1)
    return _as_numpy(array).reshape(-1)


def empty_bytes(nbytes: int) -> np.ndarray[Any, Any]:
    """A new array of bytes, which takes no memory until it is written to."""
    return np.empty(nbytes, np.uint8)


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    if is_on_gpu(array):
        raise InvalidTensorError(
            f"the {type(array).__name__} is in the memory of a GPU, which this operation does not take",
            "copy it to the CPU first",
        )
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        pass
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidTensorError(
                f"the memory of this {type(array).__name__} cannot be accessed: {error}", "move it to the CPU first"
            ) from error
    raise InvalidTensorError(
        f"an object of type {type(array).__name__} is not an array",
        "pass a numpy array, a CPU torch tensor, or an object with DLPack or the buffer protocol",
    )


def _describe_numpy(array: np.ndarray[Any, Any], writable: bool) -> Memory:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidTensorError(
            "the array is masked, and elements under its mask would be summed as well",
            "pass array.filled(0), or array.data to sum them",
        )
    dtype = _core_dtype(array.dtype)
    if not array.flags.c_contiguous:
        raise InvalidTensorError(
            f"the array of shape {array.shape} is not contiguous", "pass numpy.ascontiguousarray(array)"
        )
    if writable and not array.flags.writeable:
        raise InvalidTensorError(*READ_ONLY)
    address = array.__array_interface__["data"][0]
    return Memory(array, address, array.size, array.nbytes, dtype, array, address, array.nbytes)


def describe_torch(tensor: Any, *, keep: Any) -> Memory:
    """Describes a torch tensor as describe() does; the description keeps `keep` alive."""
    if not tensor.is_cpu:
        raise InvalidTensorError(f"the tensor is on {tensor.device}", "move it to the CPU first: tensor.cpu()")
    dtype = check_dense(tensor)
    count = tensor.numel()
    address, storage = check_values(tensor)
    return Memory(keep, address, count, count * tensor.itemsize, dtype, storage, storage.data_ptr(), storage.nbytes())


def check_dense(tensor: Any) -> Dtype:
    """Returns the dtype of a torch tensor.

    Raises:
        InvalidTensorError: it is not supported; or the tensor is not dense or not contiguous.
    """
    dtype: Dtype = _core_dtype(tensor.dtype)
    if tensor.layout is not sys.modules["torch"].strided:
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is not dense: its layout is {tensor.layout}",
            "pass tensor.to_dense(), or make the layer with sparse=False",
        )
    if not tensor.is_contiguous():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous", "pass tensor.contiguous()"
        )
    return dtype


def check_values(tensor: Any) -> tuple[int, Any]:
    """Returns (the address of a contiguous torch tensor's values, its storage).

    Raises:
        InvalidTensorError: there is no memory with its values, as with a DTensor, or after the storage was given back
            by resize_(0); or it holds them with the other sign.
    """
    address, storage, size = tensor.data_ptr(), tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if size > 0 and (address == 0 or address + size > storage.data_ptr() + storage.nbytes()):
        raise InvalidTensorError(
            f"the {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory with its values",
            "pass a tensor that has: of a DTensor, tensor.to_local(); of FSDP's parameters, while they are unsharded",
        )
    if tensor.is_neg():
        raise InvalidTensorError(
            f"the tensor of shape {tuple(tensor.shape)} is a view of values with the other sign",
            "pass tensor.resolve_neg()",
        )
    return address, storage


def note_change(array: Any) -> None:
    """Lets autograd know that an operation has written to an array, or is about to, if that is a torch tensor."""
    if type(array) is np.ndarray:
        return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and not array.is_inference():
        torch.autograd.graph.increment_version(array)


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """As zeros(), for programs that write to all of it before they read: what is in it is not promised."""
    return zeros(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """A numpy array of zeros that the other processes of this host can map, so that it is synchronised without copies.

    Args:
        shape: as for numpy.empty.
        dtype: any that push_pull takes: its name, or the dtype of numpy or torch. bfloat16 needs the package
            ml_dtypes.

    A process that is forked, such as a worker of torch's DataLoader, inherits the array as a copy, like other memory:
    what it writes stays its own. Parts that it has not written may show what the parent writes later; pass it a copy if
    that matters. To share an array with child processes, use multiprocessing.shared_memory.

    Raises:
        InvalidArgumentError: `shape` is no shape.
        InvalidTensorError: `dtype` is not supported.
        TransportError: there is not enough shared memory.
    """
    wanted = numpy_dtype(dtype)
    extent = argument_types.extent_of(shape)
    count = math.prod(extent)
    nbytes = count * wanted.itemsize
    if nbytes > sys.maxsize:
        raise TransportError(f"cannot create shared memory: {nbytes} bytes are more than any machine has", "use less")
    shared = _core.SharedMemory(max(nbytes, 1))
    view = memoryview(shared)
    array: np.ndarray[Any, Any] = np.frombuffer(view, dtype=wanted, count=count)
    return array.reshape(extent)

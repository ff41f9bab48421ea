# SPDX-License-Identifier: Apache-2.0
"""Arrays that all processes of a host can map."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bps_rdma import _core, argument_types, arrays
from bps_rdma.errors import TransportError


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """A zeroed numpy array that the other processes of this host can map, so that it is synchronised without copies.

    Args:
        shape: as for numpy.empty.
        dtype: any that push_pull takes: its name, or the dtype of numpy or torch. bfloat16 needs the package
            ml_dtypes.

    A process that is forked, such as a worker of torch's DataLoader, inherits the array as a copy, like other memory:
    what it writes stays its own. Parts that it has not written may show what the parent writes later; pass it a copy if
    that matters. To share an array with child processes, use multiprocessing.shared_memory.

    Raises:
        InvalidArgumentError: `shape` is none.
        InvalidTensorError: `dtype` is not supported.
        TransportError: there is not enough shared memory.
    """
    wanted = arrays.numpy_dtype(dtype)
    extent = argument_types.extent_of(shape)
    count = math.prod(extent)
    nbytes = count * wanted.itemsize
    if nbytes > sys.maxsize:
        raise TransportError(f"cannot create shared memory: {nbytes} bytes are more than any machine has", "use less")
    shared = _core.SharedMemory(max(nbytes, 1))
    view = memoryview(shared)
    array: np.ndarray[Any, Any] = np.frombuffer(view, dtype=wanted, count=count)
    return array.reshape(extent)

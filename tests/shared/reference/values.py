# SPDX-License-Identifier: Apache-2.0
"""Values that ranks push, and what their sums must be.

Every value depends on rank, round, name and place, so that an answer of another round, rank, name or partition is
never right by accident. Sums are taken in int64 and then wrapped to the dtype, as the servers do.
"""

from typing import Any

import numpy as np

# Small enough that half types hold every sum of four ranks exactly; bfloat16 holds integers up to 256.
_MODULUS = 61

NUMPY_DTYPES = ("float32", "float64", "float16", "uint8", "int8", "int32", "int64", "bool")


def wide(count: int, rank: int, round_: int, index: int) -> np.ndarray[Any, Any]:
    """f(rank, round, index) for `count` elements, as int64 between -30 and 30."""
    place = np.arange(count, dtype=np.int64)
    return (place * 7 + rank * 17 + round_ * 5 + index * 29) % _MODULUS - 30


def pushed(count: int, dtype: str, rank: int, round_: int = 0, index: int = 0) -> np.ndarray[Any, Any]:
    """What a rank pushes. bool: true for a third of the values."""
    values = wide(count, rank, round_, index)
    return values % 3 == 0 if dtype == "bool" else values.astype(dtype)


def summed(count: int, dtype: str, ranks: Any, round_: int = 0, index: int = 0) -> np.ndarray[Any, Any]:
    """The sum over `ranks`: wraps for integers, "any" for bool."""
    parts = [wide(count, rank, round_, index) for rank in ranks]
    if dtype == "bool":
        return np.any([part % 3 == 0 for part in parts], axis=0)
    return np.sum(parts, axis=0).astype(dtype)

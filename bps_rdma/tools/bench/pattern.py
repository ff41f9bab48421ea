# SPDX-License-Identifier: Apache-2.0
"""Test data with a known sum: values differ by rank, round and position, and sums are exact integers.

value(rank, round, i) = weight(rank) * (i mod period + round mod rounds). Period and rounds are as large as the dtype
allows while the sum stays exact. The period is a prime and, where the dtype has room for more than 2, does not divide
the usual partition sizes, so that exchanged partitions are noticed. The round's part reveals data of an earlier round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bps_rdma.errors import BpsError
from bps_rdma.tools.bench.plan import DTYPES

Array = np.ndarray[Any, Any]

# The largest integer up to which every integer is exact.
_EXACT = {
    "float32": 1 << 24, "float64": 1 << 53, "float16": 1 << 11, "bfloat16": 1 << 8,
    "int8": 127, "uint8": 255, "int32": (1 << 31) - 1, "int64": (1 << 63) - 1,
}  # fmt: skip
_PRIMES = (251, 127, 61, 31, 13, 11, 7, 3, 2, 1)
_ROUNDS = 16
_TILE_ELEMENTS = 4096  # copying whole tiles runs at the speed of memory
_BLOCK_TILES = 64  # compared at a time: a quarter of a million elements, which fit into the cache


class WrongResultError(BpsError):
    """A result differs from the known sum."""


class Pattern:
    """Fills and checks arrays of one dtype for one rank of `world`.

    Arrays are flat numpy arrays; bfloat16, which numpy lacks, is handled as its bits in uint16.
    """

    def __init__(self, dtype: str, world: int) -> None:
        """Raises InvalidArgumentError for a dtype that cannot hold the sum of `world` ranks."""
        self.dtype = dtype
        # Different weights reveal whose contribution is missing. With many ranks, narrow types have no room for them.
        weights = np.arange(1, world + 1)
        self._weights = weights if weights.sum() <= _EXACT[dtype] else np.ones_like(weights)
        room = _EXACT[dtype] // max(int(self._weights.sum()), 1)
        self._rounds = max(1, min(_ROUNDS, room // 2))
        self._period = next((p for p in _PRIMES if p - 1 + self._rounds - 1 <= room), 1)
        self._tile = _TILE_ELEMENTS - _TILE_ELEMENTS % self._period

    def fill(self, array: Array, rank: int, round_: int, begin: int = 0) -> None:
        """Write the values of `rank` into `array`, whose first element is at position `begin` of the tensor."""
        tile = self._values(int(self._weights[rank]), round_, begin)
        whole = array.size - array.size % self._tile
        array[:whole].reshape(-1, self._tile)[:] = tile
        array[whole:] = tile[: array.size - whole]

    def check_sum(self, array: Array, round_: int, begin: int = 0) -> None:
        """Raise WrongResultError unless `array` is the sum over all ranks."""
        self._check(array, int(self._weights.sum()), round_, begin)

    def check_copy(self, array: Array, rank: int, round_: int, begin: int = 0) -> None:
        """Raise WrongResultError unless `array` is what `rank` filled in."""
        self._check(array, int(self._weights[rank]), round_, begin)

    def _values(self, weight: int, round_: int, begin: int) -> Array:
        positions = np.arange(begin, begin + self._tile) % self._period
        values = weight * (positions + round_ % self._rounds)
        if self.dtype == "bfloat16":  # the upper half of the float32; exact, because the values are small
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.dtype)

    def _check(self, array: Array, weight: int, round_: int, begin: int) -> None:
        tile = self._values(weight, round_, begin)
        whole = array.size - array.size % self._tile
        rows = array[:whole].reshape(-1, self._tile)
        right = all(
            bool((rows[first : first + _BLOCK_TILES] == tile).all()) for first in range(0, len(rows), _BLOCK_TILES)
        )
        if right and bool((array[whole:] == tile[: array.size - whole]).all()):
            return
        wanted = np.resize(tile, array.size)
        wrong = np.flatnonzero(array != wanted)
        first = int(wrong[0])
        raise WrongResultError(
            f"round {round_}: {wrong.size} of {array.size} {self.dtype} elements are wrong, the first at "
            f"{begin + first}: {array[first]} instead of {wanted[first]}",
            "this is a bug in bps_rdma or in the library it is compared with; please report it with the command line",
        )


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return DTYPES[dtype]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that stands for `dtype` in a Pattern."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)

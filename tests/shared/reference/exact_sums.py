# SPDX-License-Identifier: Apache-2.0
"""Exact sums by rational numbers, and eight gradients that show every way of getting them wrong."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

COUNT = 6_000  # several partitions, and a rest that fills no vector
NAN = {"float16": b"\x00\x7e", "float32": b"\x00\x00\xc0\x7f", "float64": b"\x00\x00\x00\x00\x00\x00\xf8\x7f"}


POWERS = np.array([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0, 1e1])  # numpy's own depend on the processor


def gradients(dtype: str) -> list[np.ndarray]:
    """Eight of COUNT elements: the last 1,000 of each are odd, the others like gradients."""
    random = np.random.default_rng(5)
    limits = np.finfo(dtype)
    found = []
    for _ in range(8):
        values = random.standard_normal(COUNT) * POWERS[random.integers(-5, 2, COUNT) + 5]
        places = random.integers(limits.minexp - 5, limits.maxexp - 1, 1000)
        with np.errstate(over="ignore"):
            values[-1000:] = np.ldexp(random.integers(-7, 8, 1000).astype(float), places)
            found.append(values.astype(dtype))
    a, b, c = found[0], found[1], found[2]
    a[-900:-800] = -b[-900:-800]  # what is left are the others, however small
    b[-800:-700] = c[-800:-700] = limits.smallest_subnormal
    a[-10], b[-9], c[-8], a[-7] = np.inf, -np.inf, np.nan, np.inf
    c[-7] = -np.inf
    c[-6:-5].view(np.uint8)[:1] = 1  # a NaN with bits of its own, below
    c[-6] = np.nan
    for one in found:
        one[-5], one[-4] = -0.0, 0.0
    a[-4] = -0.0
    return found


def rounded(value: Fraction, dtype: str) -> Any:
    """To the nearest number of this type, ties to even."""
    if value == 0:
        return np.dtype(dtype).type(0)
    limits = np.finfo(dtype)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()  # of its highest bit, or one more
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, limits.minexp) - limits.nmant)
    result = round(value / unit) * unit  # Python rounds halves to even
    if abs(result) >= Fraction(2) ** (limits.maxexp):
        return np.dtype(dtype).type(math.copysign(math.inf, value))
    return np.dtype(dtype).type(float(result))  # no rounding is left to do


def exact_sum(arrays: list[np.ndarray], divisor: int = 1) -> np.ndarray:
    """The correctly rounded sum of each element over all arrays, divided."""
    dtype = arrays[0].dtype.name
    result = np.empty_like(arrays[0])
    for i in range(len(result)):
        terms = [one[i] for one in arrays]
        infinite = {float(term) for term in terms if np.isinf(term)}
        if any(np.isnan(term) for term in terms) or len(infinite) > 1:
            result[i : i + 1] = np.frombuffer(NAN[dtype], dtype)
        elif infinite:
            result[i] = infinite.pop()
        elif all(term == 0 and np.signbit(term) for term in terms):
            result[i] = -0.0
        else:
            result[i] = rounded(sum((Fraction(float(term)) for term in terms), Fraction(0)) / divisor, dtype)
    return result

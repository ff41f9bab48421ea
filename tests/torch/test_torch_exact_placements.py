# SPDX-License-Identifier: Apache-2.0
"""Eight fixed micro-gradients of each dtype have one SHA-256, wherever the ranks that add them are."""

import functools
import hashlib
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import harness
import pytest
import torch
from reference import exact_sums

# Of their exact sum, rounded once; test_pins() computes them by rational arithmetic.
PINS = {
    "float32": "fd44a87d0298522603aea0d92c6c8f8b22afe5b2080da452a98d722c546d358e",
    "float16": "bc4dfd5cd821911b8b642ef76f8a3c3a93bc781183651137f2300ea225b90c8a",
    "bfloat16": "f34a2e36ce7f66f72b1c7f30e3573a8b63a5c9d81755cfb0560a1c2681559997",
    "float64": "818043b7c350340e141ddcdd9aded9aaa075d63b15dd01b72f59710acfdca626",
}
SMALL = harness.cut_at(4096)


@functools.cache
def gradients(dtype: str) -> list[torch.Tensor]:
    if dtype == "bfloat16":
        return [torch.from_numpy(one).to(torch.bfloat16) for one in exact_sums.gradients("float32")]
    return [torch.from_numpy(one) for one in exact_sums.gradients(dtype)]


def digest(array: torch.Tensor) -> str:
    return hashlib.sha256(array.view(torch.uint8).numpy().tobytes()).hexdigest()


def bfloat16_sum() -> torch.Tensor:
    result = []
    for column in zip(*(one.tolist() for one in gradients("bfloat16")), strict=True):
        infinite = {term for term in column if math.isinf(term)}
        if any(map(math.isnan, column)) or len(infinite) > 1:
            result.append(math.nan)
        elif infinite:
            result.append(infinite.pop())
        elif all(term == 0 and math.copysign(1, term) < 0 for term in column):
            result.append(-0.0)
        else:
            result.append(rounded(sum(map(Fraction, column), Fraction(0))))
    bits = torch.tensor(result, dtype=torch.float64).to(torch.bfloat16)
    bits.view(torch.int16)[bits.isnan()] = 0x7FC0
    return bits


def rounded(value: Fraction) -> float:
    """To bfloat16, ties to even."""
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 7)
    result = round(value / unit) * unit
    return float(result) if abs(result) < Fraction(2) ** 128 else math.copysign(math.inf, value)


# The reference of the other ones is that of test_exact_sums.py.
@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=pytest.mark.long) if one in ("float32", "float16") else one for one in PINS]
)
def test_pins(dtype: str) -> None:
    if dtype == "bfloat16":
        found = bfloat16_sum()
    else:
        found = torch.from_numpy(exact_sums.exact_sum(exact_sums.gradients(dtype)))
    assert digest(found) == PINS[dtype]


def summed(bps: Any) -> dict[str, str]:
    """In turns, or in blocks whose order each rank has for itself."""
    found = {}
    for dtype, pin in PINS.items():
        total = bps.ExactSum(gradients(dtype)[0], name=dtype)
        turns = range(8)[bps.rank() :: bps.size()]
        blocks = range(8 // bps.size() * bps.rank(), 8 // bps.size() * (bps.rank() + 1))
        for way in (turns, blocks, reversed(blocks)):
            total.clear()
            for number in way:
                total.add(gradients(dtype)[number])
            found[dtype] = digest(total.push_pull())
            assert found[dtype] == pin, (dtype, way)
    if bps.size() == 8:  # the same in one call, of what nobody has added up before
        for dtype, pin in PINS.items():
            one = bps.push_pull(gradients(dtype)[bps.rank()], average=False, name=f"{dtype} in one", exact=True)
            assert digest(one) == pin, dtype
    return found


def layouts(ranks: int) -> Iterator[str]:
    """All ways to put ranks on hosts, up to the names of hosts."""

    def more(before: str, hosts: int) -> Iterator[str]:
        if len(before) == ranks:
            yield before
            return
        for host in range(hosts + 1):
            yield from more(before + chr(ord("a") + host), max(hosts, host + 1))

    return more("", 0)


def sizes(ranks: int, most: int) -> Iterator[str]:
    """All ways to cut ranks into hosts of no increasing size, one after the other."""
    if ranks == 0:
        yield ""
    for size in range(min(ranks, most), 0, -1):
        for rest in sizes(ranks - size, size):
            yield "a" * size + "".join(chr(ord(host) + 1) for host in rest)


SHORT = [("ab", None, {}), ("abab", 2, SMALL), ("aaabbbcc", None, {})]
LONG = [("a", None, {})]
LONG += [(layout, None, {}) for ranks in (2, 4) for layout in layouts(ranks)]
LONG += [(layout, 2, SMALL) for layout in layouts(4)]
LONG += [(layout, None, {}) for layout in sizes(8, 8)]
LONG += [(layout, 3, SMALL) for layout in ("abababab", "abcabcab", "aabbaabb", "abbbbbba", "abcdabcd")]


def check(layout: str, servers: int | None, env: dict[str, str]) -> None:
    results = harness.run(summed, servers=servers, env=env, **harness.on_hosts(layout))
    assert all(result == PINS for result in results)


@pytest.mark.parametrize(("layout", "servers", "env"), SHORT, ids=lambda value: value if isinstance(value, str) else "")
def test_one_digest(layout: str, servers: int | None, env: dict[str, str]) -> None:
    check(layout, servers, env)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "servers", "env"), LONG, ids=lambda value: value if isinstance(value, str) else "")
def test_one_digest_for_every_placement(layout: str, servers: int | None, env: dict[str, str]) -> None:
    check(layout, servers, env)

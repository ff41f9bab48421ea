# SPDX-License-Identifier: Apache-2.0
"""Exact sums through real processes: the numbers alone decide the bits, see docs/exact.md."""

import functools
import resource
from fractions import Fraction
from typing import Any

import harness
import numpy as np
import pytest
from bodies.exact_sums import digest, expected, in_one_call, summed
from reference.exact_sums import COUNT, gradients, rounded

import bps_rdma
from bps_rdma import _core, arrays
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError, MismatchError
from bps_rdma.settings import config_with

TCP = {"BPS_TRANSPORT": "tcp"}
SMALL = harness.cut_at(4096)


# (workers, servers, hosts, environment, how gradients are spread)
PLACEMENTS = {
    "one": (1, None, None, {}, "blocks"),
    "two over tcp": (2, None, None, TCP, "strided"),
    "two, three servers, small partitions": (2, 3, None, TCP | SMALL, "blocks"),
    "two hosts": (2, None, "ab", {}, "blocks"),
    "four": (4, None, None, {}, "strided"),
    "two and two": (4, None, "aabb", {}, "blocks"),
    "three and one, a server": (4, 1, "aaab", SMALL, "strided"),
    "eight": (8, None, None, SMALL, "blocks"),
    "eight on three hosts": (8, None, "aaabbbcc", {}, "blocks"),
    "eight, taking turns": (8, 2, "abababab", SMALL, "blocks"),
    "four and four, no sum on the host": (8, None, "aaaabbbb", {"BPS_HOST_SUM": "0"}, "blocks"),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_digest_for_all_worlds(placement: str, dtype: str) -> None:
    workers, servers, hosts, env, grouping = PLACEMENTS[placement]
    where: Any = harness.on_hosts(hosts) if hosts else {"workers": workers}
    results = harness.run(summed, dtype, grouping, servers=servers, env=env, **where)
    assert set(results) == {digest(expected(dtype))}


# What each rank pushes is one term; so eight ranks give the bits that one rank gives with eight terms.
CALLS = [(dtype, average) for dtype in ("float32", "float16", "float64") for average in (False, True)]


def in_all_calls(bps: Any) -> list[list[str]]:
    return [in_one_call(bps, dtype, average) for dtype, average in CALLS]


@pytest.mark.parametrize(
    ("hosts", "env"), [(None, {}), (None, TCP | SMALL), ("aaabbccc", {}), ("aaaaaaab", SMALL)], ids=str
)
def test_calls_give_the_same_bits(hosts: str | None, env: dict[str, str]) -> None:
    where: Any = harness.on_hosts(hosts) if hosts else {"workers": 8}
    for result in harness.run(in_all_calls, env=env, **where):
        for found, (dtype, average) in zip(result, CALLS, strict=True):
            assert set(found) == {digest(expected(dtype, 8 if average else 1))}, (dtype, average)


def divided(bps: Any, dtype: str, **how: Any) -> bytes:
    total = bps.ExactSum(gradients(dtype)[0])
    for number in range(8)[bps.rank() :: bps.size()]:
        total.add(gradients(dtype)[number])
    return total.push_pull(**how).tobytes()


def test_accumulated_sums_are_divided_once() -> None:
    for how, divisor in ({"divisor": 8}, 8), ({"divisor": 3000}, 3000), ({"average": True}, 2):
        results = harness.run(functools.partial(divided, dtype="float32", **how), workers=2)
        assert set(results) == {expected("float32", divisor)}
    assert set(harness.run(functools.partial(divided, dtype="float64", average=True), workers=2)) == {
        expected("float64", 2)
    }


def by_setting(bps: Any) -> str:
    integers = np.arange(5)
    assert (bps.push_pull(integers, average=False) == bps.size() * integers).all()
    return digest(bps.push_pull(gradients("float32")[bps.rank()], average=False).tobytes())


def test_setting() -> None:
    assert set(harness.run(by_setting, workers=8, env={"BPS_EXACT": "1"})) == {digest(expected("float32"))}


@harness.on_ranks(workers=2)
def test_bad_input_is_refused(bps: Any) -> None:
    array = np.ones(4, np.float32)
    with pytest.raises(InvalidArgumentError, match="not exact"):
        bps.push_pull(array, exact=True, compression=bps.Int8())
    with pytest.raises(InvalidArgumentError, match="neither True nor False"):
        bps.push_pull(array, exact="yes")
    bps.push_pull(array, name="plain")
    with pytest.raises(MismatchError, match="'exact'"):
        bps.push_pull(array, name="plain", exact=True)
    with pytest.raises(InvalidArgumentError, match="not a reduction"):
        bps.push_pull(array, op="exact_sum")
    assert bps.push_pull(np.arange(3), average=False, exact=True)[2] == 2 * bps.size()  # integers are exact anyway
    total = bps.ExactSum(array)
    with pytest.raises(InvalidArgumentError, match="3 elements of float32"):
        total.add(array[:3])
    with pytest.raises(InvalidArgumentError, match="4 elements of float64"):
        total.add(array.astype(np.float64))
    with pytest.raises(InvalidTensorError, match="int64"):
        bps.ExactSum(np.arange(3))
    for divisor in (0, -1, 1 << 20, 2.5):
        with pytest.raises(InvalidArgumentError, match="divisor"):
            total.push_pull(divisor=divisor)
    with pytest.raises(InvalidArgumentError, match="average=True"):
        total.push_pull(average=True, divisor=2)
    with pytest.raises(InvalidArgumentError, match="float64"):
        bps.ExactSum(array.astype(np.float64)).push_pull(divisor=3)
    assert np.signbit(total.push_pull()).all()
    total.add(array)
    total.clear()
    assert np.signbit(total.push_pull()).all()


@harness.on_ranks(workers=2)
def test_ranks_must_agree(bps: Any) -> None:
    with pytest.raises(MismatchError):
        bps.push_pull(np.ones(4, np.float32), name="g", exact=bps.rank() == 0)
    bps.barrier()  # a rank that leaves would be the reason for the other one


def test_both_settings_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="BPS_EXACT"):
        config_with({"exact": True, "compression": "int8"}).check()


def with_failover(bps: Any) -> str:
    return digest(bps.push_pull(gradients("float32")[bps.rank()], average=False, exact=True).tobytes())


def test_with_failover() -> None:
    results = harness.run(with_failover, workers=8, servers=2, env={"BPS_SERVER_FAILOVER": "1"})
    assert set(results) == {digest(expected("float32"))}


def test_sums_of_gradients_take_no_repairs() -> None:
    """What the benchmark measures is what users have: no element of ordinary gradients needs the slow way."""
    found = gradients("float32")
    total = bps_rdma.ExactSum(found[0])
    for one in found:
        ordinary = one.copy()
        ordinary[-1000:] = 0
        total.add(ordinary)
    assert len(total._sum.beyond()) < COUNT // 100


@harness.on_ranks(workers=2)
def test_what_is_not_finite_takes_no_memory(bps: Any) -> None:
    """A gradient of nothing but infinities and NaN takes little more memory than one of numbers."""
    count = 300_000
    gradient = np.full(count, np.inf, np.float32)
    gradient[1::3] = np.nan
    gradient[2::3] = np.inf if bps.rank() == 0 else -np.inf
    gradient[:4] = [1e38, 1, -np.inf, 1e30]
    total = bps.ExactSum(gradient, name="g")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total.add(gradient)
    total.add(np.full(count, 1e-38, np.float32))
    result = total.push_pull()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 80_000, grown
    assert np.array_equal(result[:4], np.array([1e38, 1, -np.inf, 1e30], np.float32) * 2)
    assert np.isposinf(result[6::3]).all()
    assert np.isnan(result[4::3]).all()
    assert np.isnan(result[5::3]).all()  # infinities of both signs


def test_elements_beyond_the_sum_are_refused() -> None:
    one = np.ones(4, np.float32)
    total = _core.ExactAccumulator(arrays.Dtype.float32, 4)
    width = total.parts_per_element
    sums, parts = np.zeros(4), np.zeros(width)
    with pytest.raises(InvalidArgumentError, match="no element 4 among 4"):
        total.copy_parts([4], arrays.describe(parts, True))
    with pytest.raises(InvalidArgumentError, match="no element 4000000000 among 4"):
        total.round(
            arrays.describe(sums, False),
            [4_000_000_000],
            arrays.describe(parts, False),
            1,
            False,
            arrays.describe(one, True),
        )


@harness.on_ranks(workers=2)
def test_float16_with_as_many_terms_as_float64_holds(bps: Any) -> None:
    """8,196 terms of float16 at both ends of its range: their sum is exact in float64, and no accumulator is needed."""
    count, elements = 8196, 64
    random = np.random.default_rng(8)
    terms = random.choice(np.array([65504, -65504, 2**-24, 1, -(2.0**-14)], np.float16), (count, elements))
    terms[: count // 2, 0], terms[count // 2 :, 0] = 65504, -65504
    terms[7, 0] = 2**-24
    terms[:, 1] = 65504
    total = bps.ExactSum(terms[0], name="g")
    for one in terms[bps.rank() :: bps.size()]:
        total.add(one)
    assert not total._sum.beyond()
    units = (terms.astype(np.float64) * 2**24).astype(np.int64).sum(axis=0).tolist()  # below 2^53
    result = total.push_pull()
    assert result.tolist() == [float(rounded(Fraction(unit, 2**24), "float16")) for unit in units]

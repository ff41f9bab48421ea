# SPDX-License-Identifier: Apache-2.0
"""Compressed float16 and bfloat16: encoded, remembered and added as float32, and rounded once on each rank.

They stand in this suite because its ranks have imported torch: of numpy's types none is bfloat16.
"""

from typing import Any

import harness
import numpy as np
import pytest
from bodies import compressed_halves as bodies
from bodies.compression import PARTITION

TCP = {"BPS_TRANSPORT": "tcp"} | harness.cut_at(PARTITION)
HALVES = ("float16", "bfloat16")


def long(*values: Any) -> Any:
    """Values of a parameter, for `ci/test --all` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("workers", [2, long(3)])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_bit_is_what_the_references_say(dtype: str, workers: int, feedback: bool) -> None:
    results = harness.run(bodies.sums, dtype, feedback, workers=workers, servers=2, env=TCP)
    assert all(each == results[0] for each in results)


# Contributions to a rank's own server need no code; those of hosts are summed first.
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("text", [long("int8"), "int8:feedback=1"])
@pytest.mark.parametrize("layout", [long("abc"), "aab", long("abab")])
def test_all_ranks_get_the_same_bits(layout: str, text: str, dtype: str) -> None:
    env = harness.cut_at(PARTITION)
    results = harness.run(bodies.equal_everywhere, dtype, text, env=env, **harness.on_hosts(layout))
    assert len({result for result, _ in results}) == 1
    assert sum(codes for _, codes in results) > 0


@pytest.mark.parametrize("servers", [None, 1])
def test_what_a_host_adds_up_is_not_rounded(servers: int | None) -> None:
    env = harness.cut_at(PARTITION)
    results = harness.run(bodies.host_sums, servers=servers, env=env, **harness.on_hosts("aab"))
    assert len({result for result, _ in results}) == 1
    assert results[0][1] == 258.0


@pytest.mark.parametrize("layout", ["ab", "aab", "aabb"])
@pytest.mark.parametrize("servers", [None, 1])
def test_means_of_large_numbers_do_not_overflow(layout: str, servers: int | None) -> None:
    for average in (True, False):
        where = harness.on_hosts(layout) | {"servers": servers, "env": harness.cut_at(PARTITION)}
        assert len(set(harness.run(bodies.large_means, average, **where))) == 1


@pytest.mark.parametrize("dtype", ["float16", long("bfloat16")])
def test_reduce_scatter(dtype: str) -> None:
    assert all(harness.run(bodies.scattered, dtype, workers=3, env=TCP))
    assert any(harness.run(bodies.scattered, dtype, env=harness.cut_at(PARTITION), **harness.on_hosts("aab")))


@pytest.mark.parametrize("env", [{}, long({"BPS_SHM_CMA": "0"})])
@pytest.mark.parametrize("dtype", HALVES)
def test_on_one_host_only_if_that_is_asked_for(env: dict[str, str], dtype: str) -> None:
    for servers in (None, 1):
        where: dict[str, Any] = {"workers": 2, "servers": servers, "env": env | harness.cut_at(PARTITION)}
        assert len(set(harness.run(bodies.everywhere, dtype, **where))) == 1


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("dedicated servers", "bfloat16"), ("two and one", "float16"), long("two and one", "bfloat16")],
)
def test_a_job_goes_on_bit_by_bit(layout: str, dtype: str) -> None:
    where: dict[str, Any] = {"workers": 2, "servers": 2, "env": TCP}
    if layout == "two and one":
        where = harness.on_hosts("aab") | {"env": harness.cut_at(PARTITION)}
    text = "int4:feedback=1,momentum=0.5"
    whole = harness.run(bodies.steps, dtype, text, range(6), None, **where)
    first = harness.run(bodies.steps, dtype, text, range(3), None, **where)
    states = [state for _, state in first]
    kept = {key: value for key, value in states[0].items() if key != "saved_by"}
    assert all(value.dtype == np.float32 and value.size == bodies.COUNT for value in kept.values())
    assert states[0]["servers"].any()
    assert all(state["servers"].tobytes() == states[0]["servers"].tobytes() for state in states)
    second = harness.run(bodies.steps, dtype, text, range(3, 6), states, **where)
    assert first[0][0] + second[0][0] == whole[0][0]
    for part in kept:
        less = [{key: value for key, value in state.items() if key != part} for state in states]
        other = harness.run(bodies.steps, dtype, text, range(3, 6), less, **where)
        assert other[0][0] != second[0][0], part


@pytest.mark.parametrize("dtype", HALVES)
def test_methods_in_python_get_float32(dtype: str) -> None:
    harness.run(bodies.in_python, dtype, workers=2, env=TCP)


@harness.on_ranks(workers=2, servers=1, env=TCP | {"BPS_COMPRESSION": "int8", "BPS_MIN_COMPRESS_BYTES": "10000"})
def test_the_setting_counts_the_bytes_of_the_tensor(bps: Any) -> None:
    large, small = (bodies.halves(np.ones(count), "bfloat16") for count in (5000, 4999))
    bps.push_pull_inplace(small, name="small")
    assert bps.metrics()["total"]["compressed_bytes"] == 0
    bps.push_pull_inplace(large, name="large")
    assert bps.metrics()["total"]["uncompressed_bytes"] == 2 * 10_000

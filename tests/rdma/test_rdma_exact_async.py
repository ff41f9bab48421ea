# SPDX-License-Identifier: Apache-2.0
"""Exact sums, and weights that servers keep, over real verbs: the bodies of the tests of other transports."""

from typing import Any

import harness
import pytest
from bodies import exact_sums, stored_weights

from bps_rdma import job

ENV = harness.over("rdma") | harness.cut_at(16384)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_sums(dtype: str) -> None:
    wanted = exact_sums.digest(exact_sums.expected(dtype))
    results = harness.run(exact_sums.in_one_call, dtype, False, workers=8, servers=2, env=ENV)
    assert {one for result in results for one in result} == {wanted}
    assert set(harness.run(exact_sums.summed, dtype, "strided", workers=3, env=ENV)) == {wanted}


def of_hosts(bps: Any) -> list[str]:
    assert "rdma" in str(job.current().process.transports)
    return exact_sums.in_one_call(bps, "float32", True)


# Each host of two ranks sends what it has summed unrounded.
def test_exact_sums_of_hosts() -> None:
    env = {name: value for name, value in ENV.items() if name != "BPS_TRANSPORT"}
    results = harness.run(of_hosts, env=env, **harness.on_hosts("aabbccdd"))
    assert {one for result in results for one in result} == {exact_sums.digest(exact_sums.expected("float32", 8))}


@pytest.mark.long
def test_nothing_that_was_added_is_lost() -> None:
    assert len(set(harness.run(stored_weights.added, "float32", workers=3, servers=2, env=ENV))) == 1


def test_a_rank_that_is_too_far_ahead_waits() -> None:
    harness.run(stored_weights.bounded, workers=2, env=ENV)

# SPDX-License-Identifier: Apache-2.0
"""Ranks of one job whose settings differ: the sums are right all the same, or the rank that differs is told which.

Nobody waits for a piece that another rank sends elsewhere.
"""

from typing import Any

import harness
import numpy as np
import pytest

# On one rank alone. The hosts differ, so that placements do.
DECIDE_WHERE = {
    "BPS_PLACEMENT": "embedded",
    "BPS_KEY_HASH_FN": "balanced",
    "BPS_MIN_PARTITION_BYTES": "8192",
    "BPS_MIN_WORKERS": "1",
    "BPS_MIXED_MODE_BOUND": "102",
    "BPS_PLACEMENT_SECONDS": "7",
    "BPS_ASYNC": "1",
}
MAY_DIFFER = {
    "BPS_PARTITION_BYTES": "65536",
    "BPS_PUSH_THREAD": "2",
    "BPS_SERVER_ENGINE_THREAD": "2",
    "BPS_HOST_SUM": "0",
    "BPS_SCHEDULING_CREDIT": "1",
    "BPS_TCP_STREAMS": "1",
    "BPS_SHM_CMA": "0",
    "BPS_STAGING_BYTES": "65536",
    "BPS_LINK_GBPS": "0.5",
    "BPS_SUM_GBPS": "0.25",
    "BPS_MIN_COMPRESS_BYTES": "1000000",
    "BPS_TIMEOUT": "100",
    "BPS_HEARTBEAT_TIMEOUT": "25",
}


def sums(bps: Any) -> None:
    for number, elements in enumerate([1, 1000, 100_000, 300_001]):
        mine = np.arange(elements, dtype=np.float32) % 1000 + bps.rank()
        others = sum(rank - bps.rank() for rank in range(bps.size()))
        np.testing.assert_array_equal(bps.push_pull(mine, False, f"t{number}"), mine * bps.size() + others)


def job(layout: str, different: dict[str, str], servers: int | None, env: dict[str, str]) -> harness.Job:
    options = harness.on_hosts(layout)
    options["rank_env"][-1].update(different)
    return harness.start(sums, servers=servers, env={"BPS_TIMEOUT": "20"} | env, **options)


@pytest.mark.parametrize("servers", [None, 2])
@pytest.mark.parametrize("layout", ["aab", "aa"])
@pytest.mark.parametrize(("name", "value"), [*MAY_DIFFER.items(), ("BPS_PARTITION_BYTES", "4194304")])
def test_settings_that_each_rank_may_choose(name, value, layout, servers):
    with job(layout, {name: value}, servers, {}) as running:
        running.results()


def expect_refusal(different: dict[str, str], servers: int | None, env: dict[str, str]) -> None:
    """Of whoever comes later."""
    [(name, value)] = different.items()
    with job("aab", different, servers, env) as running:
        running.eventually(lambda: any(map(running.has_failed, running.ranks)), what="a rank that is refused")
        errors = running.report()
        assert "MismatchError" in errors
        assert f"{name} is {value} here, and " in errors or f"here, and {value} on " in errors


@pytest.mark.parametrize("servers", [None, 2])
@pytest.mark.parametrize("name", DECIDE_WHERE)
def test_settings_that_decide_where_a_piece_is_summed(name, servers):
    expect_refusal({name: DECIDE_WHERE[name]}, servers, {"BPS_PARTITION_BYTES": "524288"})


@pytest.mark.parametrize("different", [{"BPS_SERVER_FAILOVER": "0"}, {"BPS_DEVICE_ROUTE": "1"}])
def test_failover_on_some_ranks(different):
    expect_refusal(different, 2, {"BPS_MIN_WORKERS": "1"})

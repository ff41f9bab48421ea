# SPDX-License-Identifier: Apache-2.0
"""A rail that fails in the middle of a job, over RDMA: two ranks, two devices each, and a cable between each pair.

It costs a moment and no round, no byte changes that should not, and the rail is used again when it is back.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import fabric
import harness
import pytest
from bodies.rails import BACK, LOST, Start, fails_and_comes_back, jobs, longest, rounds_until_told
from levels import cases

pytestmark = pytest.mark.vm


def rounds_by(bps: Any, folder: str) -> dict[str, Any]:
    names = os.environ["BPS_RDMA_HCA"][1:].split(",")

    def sent() -> dict[str, int]:
        return {name[:-1]: fabric.hardware_counters(name).get("sent_pkts", 0) for name in names}  # 0: it was removed

    return rounds_until_told(bps, folder, sent, words=1 << 18)


@pytest.fixture
def start(cables, tmp_path) -> Iterator[Start]:
    env = harness.over("rdma") | {"BYTEPS_PARTITION_BYTES": str(128 << 10)}
    env |= {"BPS_HEARTBEAT_TIMEOUT": str(20 * harness.PATIENCE)}
    of_rank = [
        {"BPS_RDMA_HCA": "=" + ",".join(cable.ends[rank].hca for cable in cables), "BPS_INTERFACE": "lo"}
        for rank in range(2)
    ]
    with jobs(tmp_path, rounds_by, env=env, rank_env=of_rank) as begin:
        yield begin


Act = Callable[[fabric.Cable], None]
FAILURES: dict[str, tuple[int, Act, Act]] = {
    "silent": (1, lambda c: c.disturb("loss", "100%"), lambda c: c.disturb()),
    "one direction": (1, lambda c: c.disturb("loss", "100%", at=(0,)), lambda c: c.disturb()),
    "the other direction": (1, lambda c: c.disturb("loss", "100%", at=(1,)), lambda c: c.disturb()),
    "link down": (1, lambda c: c.set_link("down"), lambda c: c.set_link("up")),
    "the other end's link down": (1, lambda c: c.set_link("down", at=1), lambda c: c.set_link("up", at=1)),
    "the first": (0, lambda c: c.disturb("loss", "100%"), lambda c: c.disturb()),
}


@pytest.mark.parametrize("failure", cases(["link down"], [each for each in FAILURES if each != "link down"]))
def test_a_rail_fails_and_comes_back(cables, start, failure):
    number, fail, mend = FAILURES[failure]
    lost, left = (cable.ends[0].hca[:-1] for cable in (cables[number], cables[1 - number]))
    fails_and_comes_back(start(), lambda: fail(cables[number]), lambda: mend(cables[number]), lost, left, 15)


@pytest.mark.long
def test_a_rail_that_flaps(cables, start):
    running = start()
    for number in range(1, 4):
        cables[1].set_link("down")
        running.until_all_say(LOST, number)
        cables[1].set_link("up")
        running.until_all_say(BACK, number)
        running.more(3)
    results = running.results()
    print(f"flaps: the longest round took {longest(results):.2f} s more than the others")
    assert all(result["counters"]["paths_lost"] >= 3 for result in results)


@pytest.mark.long
def test_a_device_that_is_removed_costs_its_rail_only(cables, start):
    running = start()
    fabric.command("rdma", "link", "del", cables[1].ends[1].hca)
    running.until_all_say(LOST)
    running.more(15)
    for result in running.results():
        assert result["counters"]["paths_lost"] >= 1


@pytest.mark.long
def test_a_rank_that_is_stopped_for_a_while_loses_no_rail(start):
    running = start()
    running.job.kill("rank 1", signal.SIGSTOP)
    time.sleep(10)  # longer than a rail may be silent, and than the peer has buffers for questions
    running.job.kill("rank 1", signal.SIGCONT)
    running.more(10)
    assert [result["counters"]["paths_lost"] for result in running.results()] == [0, 0]


@pytest.mark.long
def test_the_last_rail_is_an_error(cables, start):
    running = start(BPS_HEARTBEAT_TIMEOUT="3")
    for cable in cables:
        cable.disturb("loss", "100%")
    with pytest.raises(harness.JobFailedError, match="PeerLostError"):
        running.job.results()

# SPDX-License-Identifier: Apache-2.0
"""A network interface that fails in the middle of a job, over TCP: two namespaces that two networks join.

It costs a moment and no round, no byte changes that should not, and the interface is used again when it is back.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import harness
import pytest
from bodies.rails import FIRST, MEMBERS, SECOND, enter, fails_and_comes_back, jobs, longest, rounds_until_told, sent
from harness import network


def rounds_in(bps: Any, namespaces: list[str], folder: str) -> dict[str, Any]:
    enter(namespaces[int(os.environ["RANK"])])
    return rounds_until_told(bps, folder, sent)


@pytest.fixture
def start(networks, tmp_path):
    env = {
        "BPS_TRANSPORT": "tcp",
        "BPS_INTERFACE": f"{FIRST},{SECOND}",
        "BPS_HEARTBEAT_TIMEOUT": "30",  # of the scheduler, which may be reached by the interface that fails
        "MASTER_ADDR": networks.address(MEMBERS[0], FIRST),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    namespaces = [networks.namespace(member) for member in MEMBERS]
    with jobs(tmp_path, rounds_in, namespaces, env=env) as begin:
        yield begin


Act = Callable[[network.Network], None]
FAILURES: dict[str, tuple[Act, Act]] = {
    "link down": (lambda n: n.set_link(MEMBERS[1], SECOND, "down"), lambda n: n.set_link(MEMBERS[1], SECOND, "up")),
    "silent": (lambda n: n.cut(MEMBERS[1], SECOND, "both"), lambda n: n.mend(SECOND)),
    "nothing goes out": (lambda n: n.cut(MEMBERS[1], SECOND, "out"), lambda n: n.mend(SECOND)),
    "nothing comes in": (lambda n: n.cut(MEMBERS[1], SECOND, "in"), lambda n: n.mend(SECOND)),
    "the first": (lambda n: n.set_link(MEMBERS[1], FIRST, "down"), lambda n: n.set_link(MEMBERS[1], FIRST, "up")),
}


# What is silent both ways is found as what is silent one way is.
@pytest.mark.parametrize(
    "failure", [pytest.param(one, marks=pytest.mark.long) if one == "silent" else one for one in FAILURES]
)
def test_an_interface_fails_and_comes_back(networks, start, failure):
    fail, mend = FAILURES[failure]
    lost, left = (FIRST, SECOND) if failure == "the first" else (SECOND, FIRST)
    fails_and_comes_back(start(), lambda: fail(networks), lambda: mend(networks), lost, left, 30)


def test_an_interface_that_flaps(networks, start):
    running = start()
    for _ in range(4):
        networks.set_link(MEMBERS[1], SECOND, "down")
        running.more(5)
        networks.set_link(MEMBERS[1], SECOND, "up")
        running.more(5)
    results = running.results()
    print(f"flaps: the longest round took {longest(results):.2f} s more than the others")


def test_a_rank_that_is_stopped_for_a_while_loses_no_rail(start):
    running = start()
    running.job.kill("rank 1", signal.SIGSTOP)
    time.sleep(2)  # bytes for it wait; longer than a rail may be silent
    running.job.kill("rank 1", signal.SIGCONT)
    running.more(10)
    assert [result["counters"]["paths_lost"] for result in running.results()] == [0, 0]


def test_the_last_interface_is_an_error(networks, start):
    running = start(BPS_HEARTBEAT_TIMEOUT="3")
    for interface in (FIRST, SECOND):
        networks.set_link(MEMBERS[1], interface, "down")
    with pytest.raises(harness.JobFailedError, match="PeerLostError"):
        running.job.results()

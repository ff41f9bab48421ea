# SPDX-License-Identifier: Apache-2.0
"""A server that counts as lost cannot touch memory any more, also when it was only stopped and wakes up later."""

import os
import signal
import time
from typing import Any

import harness
import pytest
from bodies.arrays import caught, changed, make
from harness import await_mark, mark

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(2 * harness.PATIENCE)}
# So much that the server is stopped with sums before it, whenever that happens.
ARRAYS, COUNT = 8, 2_000_000
MINE = 42.0


def embedded(rank: int, port: int) -> None:
    """The variables of another job of the same ranks, in which each of them is a server."""
    for name in [name for name in os.environ if name.startswith("DMLC_")]:
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip


def survives_its_server(bps: Any, memory: str, port: int) -> dict[str, Any]:
    bps.init()
    rank = bps.rank()
    arrays = [make(bps, memory, COUNT) for _ in range(ARRAYS)]

    def round_() -> None:
        for array in arrays:
            array.fill(1)
        bps.wait([bps.push_pull_async_inplace(array, False, f"n{i}") for i, array in enumerate(arrays)])

    def rounds() -> None:
        while True:
            round_()

    round_()
    mark("ready")
    found = {"error": caught(rounds)}
    bps.shutdown()
    for array in arrays:
        array.fill(MINE)

    embedded(rank, port)
    bps.init()
    other = make(bps, memory, COUNT)
    other.fill(1)
    bps.push_pull_inplace(other, False, name="x")
    found["next"] = changed(other, 2)
    other.fill(MINE)
    mark("has another server")
    await_mark("continued")
    time.sleep(1)  # a server that can still write does it at once
    found["changed"] = [bad for array in [*arrays, other] if (bad := changed(array, MINE))]
    bps.shutdown()
    return found


# A server maps memory of shared memory alone; over TCP, and where it copies, it has what was sent.
@pytest.mark.parametrize(
    ("transport", "memory"),
    [
        ("shm", "mapped"),
        ("tcp", "plain"),
        pytest.param("shm", "plain", marks=pytest.mark.long),
        pytest.param("tcp", "mapped", marks=pytest.mark.long),
    ],
)
def test_a_stopped_server_that_wakes_up_changes_nothing(transport, memory):
    args = (memory, harness.free_port())
    with harness.start(
        survives_its_server, *args, workers=2, servers=1, env=FAST | harness.over(transport), init=False
    ) as job:
        job.await_marks("ready")
        job.kill("server 0", signal.SIGSTOP)
        job.await_marks("has another server")
        job.kill("server 0", signal.SIGCONT)
        job.set_mark("continued")
        values = job.values()
    for rank, found in enumerate(values):
        assert found["error"].startswith("PeerLostError"), found
        assert "server" in found["error"], found
        assert not found["next"], f"rank {rank}, with another server: {found['next']}"
        assert not found["changed"], f"rank {rank}: {found['changed']}"

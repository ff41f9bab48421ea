# SPDX-License-Identifier: Apache-2.0
"""A dedicated server whose host vanishes from the network: for good, with nothing under way, or for some seconds."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator

import harness
import pytest
from harness import network

HEARTBEAT_S = 1
END_S = 20
# TCP sends again what was lost about 3 and 6 s after it was sent first.
PAUSE_S = 4.5
TRAINS = """
import sys, time, numpy, bps_rdma as bps
bps.init()
array = numpy.ones(100_000, numpy.float32)
bps.push_pull_inplace(array, name="x")
print("summed", flush=True)
sys.stdin.read()
"""


KEEPS_SUMMING = """
import sys, threading, numpy, bps_rdma as bps
bps.init()
array = numpy.ones(100_000, numpy.float32)
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
while not ended.wait(0.01):
    bps.push_pull_inplace(array, name="x")
    print("summed", flush=True)
bps.shutdown()
print("done", flush=True)
"""


@contextlib.contextmanager
def job(networks: network.Network, program: str, **settings: str) -> Iterator[harness.Members]:
    """The server, on a host of its own, and the worker, on that of the scheduler, which has summed."""
    here, there = network.PAIR
    env = harness.clean_env() | {
        "BPS_ROOT_URI": networks.address(here, "control"), "BPS_ROOT_PORT": str(harness.free_port()),
        "BPS_NUM_WORKERS": "1", "BPS_NUM_SERVERS": "1", "BPS_SECRET": "a" * 32, "BPS_TRANSPORT": "tcp",
        **settings,
    }  # fmt: skip
    with harness.Members() as members:
        members.command("scheduler", [harness.binary("bps-scheduler")], env, inside=networks.inside(here))
        members.command("server", [harness.binary("bps-server")], env, inside=networks.inside(there))
        members.command(
            "worker", [sys.executable, "-c", program], env | {"BPS_ROLE": "worker"}, inside=networks.inside(here),
            cwd=members.folder, told=True,
        )  # fmt: skip
        members.eventually(lambda: "summed\n" in members.log("worker"), what="the first sum")
        yield members


@pytest.mark.long
def test_a_server_that_is_cut_off_from_everybody_ends(networks: network.Network) -> None:
    there = network.PAIR[1]
    settings = {"BPS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S), "BPS_MIN_WORKERS": "1"}
    with job(networks, TRAINS, **settings) as members:
        assert members.processes["server"].wait(4 * HEARTBEAT_S) is None, "a quiet one is not cut off"
        networks.cut(there, "all", "both")
        assert members.processes["server"].wait(END_S) == 1, members.report()
        assert "was lost: silent for" in members.log("server")


@pytest.mark.long
def test_a_server_whose_machine_is_paused_goes_on(networks: network.Network) -> None:
    """While it is, nobody there acknowledges what the worker sends; a process alone that is stopped has a kernel."""
    there = network.PAIR[1]
    with job(networks, KEEPS_SUMMING) as members:
        networks.cut(there, "all", "both")
        members.kill("server", signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for plane in network.PLANES:
            networks.mend(plane)
        members.kill("server", signal.SIGCONT)
        time.sleep(2 * PAUSE_S)
        assert members.processes["worker"].status is None, members.report()
        members.processes["worker"].tell("")
        members.succeed()
        assert "summed\ndone\n" in members.log("worker"), members.report()

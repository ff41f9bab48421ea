# SPDX-License-Identifier: Apache-2.0
"""A dedicated server whose host vanishes from the network: for good, with nothing under way, or for some seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, cwd=log.parent
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def job(
    networks: network.Network, folder: Path, program: str, **settings: str
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """The server, on a host of its own, and the worker, on that of the scheduler; their logs are in the folder."""
    here, there = network.PAIR
    env = harness.clean_env() | {
        "BPS_ROOT_URI": networks.address(here, "control"), "BPS_ROOT_PORT": str(harness.free_port()),
        "BPS_NUM_WORKERS": "1", "BPS_NUM_SERVERS": "1", "BPS_SECRET": "a" * 32, "BPS_TRANSPORT": "tcp",
        "PATH": os.environ["PATH"], **settings,
    }  # fmt: skip
    with (
        running([*networks.inside(here), harness.binary("bps-scheduler")], env, folder / "scheduler"),
        running([*networks.inside(there), harness.binary("bps-server")], env, folder / "server") as server,
        running(
            [*networks.inside(here), sys.executable, "-c", program], env | {"BPS_ROLE": "worker"}, folder / "worker"
        ) as worker,
    ):
        yield server, worker


@pytest.mark.long
def test_a_server_that_is_cut_off_from_everybody_ends(networks: network.Network, tmp_path: Path) -> None:
    there = network.PAIR[1]
    settings = {"BPS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S), "BPS_MIN_WORKERS": "1"}
    with job(networks, tmp_path, TRAINS, **settings) as (server, worker):
        assert worker.stdout is not None
        assert worker.stdout.readline() == "summed\n", [path.read_text() for path in tmp_path.iterdir()]
        with pytest.raises(subprocess.TimeoutExpired):  # a quiet one is not cut off
            server.wait(4 * HEARTBEAT_S)
        networks.cut(there, "all", "both")
        status = server.wait(END_S)
    said = (tmp_path / "server").read_text()
    assert status == 1, said
    assert "was lost: silent for" in said


@pytest.mark.long
def test_a_server_whose_machine_is_paused_goes_on(networks: network.Network, tmp_path: Path) -> None:
    """While it is, nobody there acknowledges what the worker sends; a process alone that is stopped has a kernel."""
    there = network.PAIR[1]
    with job(networks, tmp_path, KEEPS_SUMMING) as (server, worker):
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert worker.stdout.readline() == "summed\n", [path.read_text() for path in tmp_path.iterdir()]
        networks.cut(there, "all", "both")
        server.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for plane in network.PLANES:
            networks.mend(plane)
        server.send_signal(signal.SIGCONT)
        time.sleep(2 * PAUSE_S)
        assert worker.poll() is None, (tmp_path / "worker").read_text()
        worker.stdin.write("\n")
        worker.stdin.flush()
        out, _ = worker.communicate(timeout=60)
        assert out.endswith("summed\ndone\n"), (out[-100:], (tmp_path / "worker").read_text())
        assert server.wait(END_S) == 0

# SPDX-License-Identifier: Apache-2.0
"""A dedicated server whose host vanishes from the network, with nothing under way: nobody tells it, and it ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cluster
import network
import pytest

HEARTBEAT_S = 1
END_S = 20
TRAINS = """
import sys, time, numpy, bps_rdma as bps
bps.init()
array = numpy.ones(100_000, numpy.float32)
bps.push_pull_inplace(array, name="x")
print("summed", flush=True)
sys.stdin.read()
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


def test_a_server_that_is_cut_off_from_everybody_ends(networks: network.Network, tmp_path: Path) -> None:
    here, there = network.PAIR
    env = cluster.clean_env() | {
        "BPS_ROOT_URI": networks.address(here, "control"), "BPS_ROOT_PORT": str(cluster.free_port()),
        "BPS_NUM_WORKERS": "1", "BPS_NUM_SERVERS": "1", "BPS_SECRET": "a" * 32, "BPS_TRANSPORT": "tcp",
        "BPS_HEARTBEAT_TIMEOUT": str(HEARTBEAT_S), "BPS_MIN_WORKERS": "1", "PATH": os.environ["PATH"],
    }  # fmt: skip
    with (
        running([*networks.inside(here), cluster.binary("bps-scheduler")], env, tmp_path / "scheduler"),
        running([*networks.inside(there), cluster.binary("bps-server")], env, tmp_path / "server") as server,
        running(
            [*networks.inside(here), sys.executable, "-c", TRAINS], env | {"BPS_ROLE": "worker"}, tmp_path / "worker"
        ) as worker,
    ):
        assert worker.stdout is not None
        assert worker.stdout.readline() == "summed\n", [path.read_text() for path in tmp_path.iterdir()]
        with pytest.raises(subprocess.TimeoutExpired):  # a quiet one is not cut off
            server.wait(4 * HEARTBEAT_S)
        networks.cut(there, "all", "both")
        status = server.wait(END_S)
    said = (tmp_path / "server").read_text()
    assert status == 1, said
    assert "was lost: silent for" in said

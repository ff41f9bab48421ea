# SPDX-License-Identifier: Apache-2.0
"""Starting: alone, under torchrun, by hand; what import costs; what idling costs."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

import bps_rdma
from bps_rdma import startup
from bps_rdma.settings import config_with


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return harness.run_command([sys.executable, "-c", textwrap.dedent(code)], env=harness.clean_env(**env), within=120)


def test_import_loads_no_extra_and_starts_nothing():
    """How long it takes, the step `wheel` measures."""
    done = python(
        """
        import os, sys
        import numpy
        threads = len(os.listdir("/proc/self/task"))
        import bps_rdma
        assert not {"torch", "ray", "typer", "rich", "matplotlib"} & set(sys.modules)
        assert len(os.listdir("/proc/self/task")) == threads
        """
    )
    assert done.returncode == 0, done.stderr


def test_alone_needs_nothing(alone):
    assert (alone.rank(), alone.size(), alone.local_rank(), alone.local_size()) == (0, 1, 0, 1)


def test_the_speed_is_that_of_what_was_finished_since_the_last_call(alone):
    array = np.ones(1_000_000, np.float32)
    before, began = time.monotonic(), time.time()
    alone.get_pushpull_speed()
    begin = time.monotonic()
    for _ in range(5):
        alone.push_pull_inplace(array, name="x")
    time.sleep(0.2)
    shortest = time.monotonic() - begin
    milliseconds, speed = alone.get_pushpull_speed()
    longest = time.monotonic() - before  # it counts from within the first call
    assert began - 1 < milliseconds / 1000 < time.time() + 1
    assert 5 * array.nbytes / longest <= speed * 1e6 <= 5 * array.nbytes / shortest
    assert alone.get_pushpull_speed()[1] == 0, "counted twice"


def test_arguments_win_and_sources_are_told(monkeypatch):
    monkeypatch.setenv("BYTEPS_PARTITION_BYTES", "65536")
    monkeypatch.setenv("BPS_TRANSPORT", "shm")
    bps_rdma.init(transport="tcp")
    try:
        values = {one.name: one for one in bps_rdma.config()}
    finally:
        bps_rdma.shutdown()
    assert (values["BPS_TRANSPORT"].value, values["BPS_TRANSPORT"].source) == ("tcp", "argument")
    assert values["BPS_PARTITION_BYTES"].source == "BYTEPS_PARTITION_BYTES"
    assert values["BPS_TIMEOUT"].source == "default"
    with pytest.raises(bps_rdma.InvalidArgumentError, match="BPS_NO_SUCH"):
        bps_rdma.init(no_such=1)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_under_torchrun(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import numpy as np, bps_rdma as bps
            bps.init()
            x = np.full(1000, bps.rank() + 1, np.float32)
            bps.push_pull_inplace(x, average=False, name="x")
            assert (x == 3).all() and (bps.size(), bps.local_size()) == (2, 2)
            bps.shutdown()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = harness.run_command(command, within=180)
    assert done.returncode == 0, done.stderr


def cpu_while_idle(bps: Any, seconds: float) -> float:
    bps.barrier()
    before = sum(os.times()[:2])
    time.sleep(seconds)
    used = sum(os.times()[:2]) - before
    bps.barrier()
    return used / seconds


@pytest.mark.long  # measures
def test_idle_costs_nothing():
    for share in harness.run(cpu_while_idle, 5.0, workers=2):
        assert share <= 0.02


def test_ranks_by_hand_in_any_order():
    def env(rank: int) -> dict[str, str]:
        return {"BYTEPS_LOCAL_RANK": str(rank % 2), "BYTEPS_LOCAL_SIZE": "2", "DMLC_WORKER_ID": str(rank // 2)}

    rank_env = [env(rank) | {"DMLC_NUM_WORKER": "2"} for rank in (3, 1, 0, 2)]
    found = harness.run(who, workers=4, servers=1, rank_env=rank_env)
    assert found == [(3, 4, 1, 2), (1, 4, 1, 2), (0, 4, 0, 2), (2, 4, 0, 2)]


def who(bps: Any) -> tuple[int, int, int, int]:
    return bps.rank(), bps.size(), bps.local_rank(), bps.local_size()


def scheduler_ports(**settings: str) -> list[int]:
    common = {"rank": "1", "world_size": "4", "local_size": "2", "root_uri": "10.0.0.1"}
    found = startup.from_config(config_with(common | settings))
    return list(found.scheduler_ports)


def test_the_scheduler_listens_within_the_range_of_ports():
    assert set(scheduler_ports(ports="40000-40003")) <= set(range(40000, 40004))
    assert scheduler_ports(ports="40000-40003") == scheduler_ports(ports="40000-40003"), "the same on all ranks"
    assert not set(scheduler_ports(ports="40000-40003", local_size="4")) & set(range(40000, 40004)), "within a host"
    assert scheduler_ports(ports="40000-40003", root_port="7") == [7]
    with pytest.raises(bps_rdma.InvalidArgumentError, match="BPS_PORTS='40000' is not a range of ports"):
        scheduler_ports(ports="40000")

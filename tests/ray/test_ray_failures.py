# SPDX-License-Identifier: Apache-2.0
"""Members that fail: the driver is told of the cause at once, and the job goes on from its last checkpoint."""

import logging
import subprocess
import sys
import time

import harness
import pytest
import ray_jobs
from ray.experimental import internal_kv

import bps_rdma.ray

SOON_S = 20 * harness.PATIENCE  # half a second on a quiet machine, and far below every time-out


@pytest.mark.parametrize(
    ("end", "servers", "cause"),
    [
        ("raise", 0, r"^rank 1 \(pid \d+ on [\d.]+\) raised ValueError: no such sample \[1 other members followed"),
        ("kill", 0, r"^rank 1 \(pid \d+ on [\d.]+\) died"),
        ("term", 0, r"^rank 1 \(pid \d+ on [\d.]+\) (died|raised RayError: rank 1 ended with sys.exit)"),
        ("server", 2, r"^server [01] \(pid \d+ on [\d.]+\): bps-server was killed by signal 9"),
        pytest.param("exit", 0, r"^rank 1 .* raised RayError: rank 1 ended with sys.exit\(3\)", marks=pytest.mark.long),
        pytest.param("stop", 0, r"^rank 0 .* raised PeerLostError: .*worker 1", marks=pytest.mark.long),
        pytest.param("kill", 2, r"^rank 1 .* died", marks=pytest.mark.long),
        pytest.param("scheduler", 2, r"^scheduler .*: bps-scheduler was killed by signal 9", marks=pytest.mark.long),
    ],
)
def test_the_cause_is_told_at_once(two_nodes, tmp_path, end, servers, cause):
    # Silence is a loss after a while only; everything else is noticed as it happens.
    env = {"BPS_HEARTBEAT_TIMEOUT": "2" if end == "stop" else "60"}
    with pytest.raises(bps_rdma.ray.JobFailedError, match=cause) as raised:
        bps_rdma.ray.run(ray_jobs.meets_an_end, ray_jobs.plan(tmp_path, end), hosts=2, servers=servers, env=env)
    assert time.time() - float((tmp_path / "happened").read_text()) < SOON_S
    assert raised.value.__cause__ is raised.value.failures[0].error
    if end == "raise":
        assert isinstance(raised.value.__cause__, ValueError)
        assert "meets_an_end" in str(raised.value.__cause__)  # the traceback of the rank


def test_a_scheduler_of_its_own_is_lost(two_nodes, tmp_path):
    with pytest.raises(
        bps_rdma.ray.JobFailedError, match=r"^scheduler .*: bps-scheduler was killed by signal 9"
    ) as raised:
        bps_rdma.ray.run(ray_jobs.meets_an_end, ray_jobs.plan(tmp_path, "scheduler"), hosts=2, own_scheduler=True)
    followed = [str(failure.cause) for failure in raised.value.failures[1:]]
    assert followed
    assert not any("hosts it" in text for text in followed)


@pytest.mark.parametrize(("end", "servers"), [("kill", 0), ("server", 2)])
def test_a_job_goes_on_from_its_last_checkpoint(two_nodes, tmp_path, caplog, end, servers):
    wanted = ray_jobs.undisturbed(tmp_path / "undisturbed")
    with caplog.at_level(logging.WARNING, "bps_rdma.ray"):
        found = bps_rdma.ray.run(
            ray_jobs.meets_an_end, ray_jobs.plan(tmp_path, end, rank=0), hosts=2, servers=servers, max_failures=1
        )
    assert found == [wanted, wanted]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("attempt 1 of 2 failed after ")


@pytest.mark.parametrize("least", [0, pytest.param(1, marks=pytest.mark.long)])
def test_nothing_outlives_its_driver(two_nodes, tmp_path, least):
    """The fixture looks for what is left."""
    driver = (
        f"import ray, ray_jobs, bps_rdma.ray\nray.init(address={two_nodes.address!r})\n"
        f"bps_rdma.ray.run(ray_jobs.meets_an_end, {ray_jobs.plan(tmp_path, 'hang')!r}, hosts=2, servers=2,\n"
        f"    min_workers={least})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        harness.eventually(
            (tmp_path / "happened").exists, 120, hopeless=lambda: process.poll() is not None and process.stderr.read()
        )
        assert len(ray_jobs.processes()) >= 2 + 2 * 3  # ranks; servers and the scheduler, and their actors
    finally:
        process.kill()
        process.communicate()
    assert internal_kv._internal_kv_list(b"bps_rdma/") == []  # what it would keep as long as the cluster lives

# SPDX-License-Identifier: Apache-2.0
"""Members that fail: the driver is told of the cause at once, and the job goes on from its last checkpoint."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import ray_jobs

import bps_rdma.ray

SOON_S = 5 * ray_jobs.PATIENCE  # far below every time-out


def plan(folder: Path, end: str, rank: int = 1) -> dict:
    return {"folder": str(folder), "steps": 6, "at": 3, "rank": rank, "end": end}


def undisturbed(folder: Path, ranks: int = 2) -> list[float]:
    folder.mkdir()
    found = bps_rdma.ray.run(ray_jobs.meets_an_end, plan(folder, "", rank=-1), hosts=ranks)
    assert all(one == found[0] for one in found)
    return found[0]


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
    env = {"BPS_HEARTBEAT_TIMEOUT": "2"} if end == "stop" else None
    with pytest.raises(bps_rdma.ray.JobFailedError, match=cause) as raised:
        bps_rdma.ray.run(ray_jobs.meets_an_end, plan(tmp_path, end), hosts=2, servers=servers, env=env)
    assert time.time() - float((tmp_path / "happened").read_text()) < SOON_S
    assert raised.value.__cause__ is raised.value.failures[0].error
    if end == "raise":
        assert isinstance(raised.value.__cause__, ValueError)
        assert "meets_an_end" in str(raised.value.__cause__)  # the traceback of the rank


def test_a_scheduler_of_its_own_is_lost(two_nodes, tmp_path):
    with pytest.raises(
        bps_rdma.ray.JobFailedError, match=r"^scheduler .*: bps-scheduler was killed by signal 9"
    ) as raised:
        bps_rdma.ray.run(ray_jobs.meets_an_end, plan(tmp_path, "scheduler"), hosts=2, own_scheduler=True)
    followed = [str(failure.cause) for failure in raised.value.failures[1:]]
    assert followed
    assert not any("hosts it" in text for text in followed)


@pytest.mark.parametrize(("end", "servers"), [("kill", 0), ("server", 2)])
def test_a_job_goes_on_from_its_last_checkpoint(two_nodes, tmp_path, caplog, end, servers):
    wanted = undisturbed(tmp_path / "undisturbed")
    with caplog.at_level(logging.WARNING, "bps_rdma.ray"):
        found = bps_rdma.ray.run(
            ray_jobs.meets_an_end, plan(tmp_path, end, rank=0), hosts=2, servers=servers, max_failures=1
        )
    assert found == [wanted, wanted]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("attempt 1 of 2 failed after ")


def test_a_job_survives_the_loss_of_a_node(two_nodes, tmp_path):
    wanted = undisturbed(tmp_path / "undisturbed", ranks=3)
    third = two_nodes.add_node(num_cpus=4, object_store_memory=80_000_000)
    two_nodes.wait_for_nodes()
    gone = threading.Thread(target=remove_when_it_hangs, args=(two_nodes, third, tmp_path / "happened"))
    gone.start()
    # The rank on the first node waits in the call where the others lose their peer.
    found = bps_rdma.ray.run(ray_jobs.meets_an_end, plan(tmp_path, "hang", rank=2), hosts=3, max_failures=1)
    gone.join()
    assert found == [wanted] * 3


def remove_when_it_hangs(cluster, node, happened: Path) -> None:
    while not happened.exists():
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)


def test_nothing_outlives_its_driver(two_nodes, tmp_path):
    """The fixture looks for what is left."""
    driver = (
        f"import ray, ray_jobs, bps_rdma.ray\nray.init(address={two_nodes.address!r})\n"
        f"bps_rdma.ray.run(ray_jobs.meets_an_end, {plan(tmp_path, 'hang')!r}, hosts=2, servers=2)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "happened").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        assert len(ray_jobs.processes()) >= 2 + 2 * 3  # ranks; servers and the scheduler, and their actors
    finally:
        process.kill()
        process.communicate()


def test_ranks_that_do_not_return_are_named(two_nodes, tmp_path):
    with pytest.raises(bps_rdma.ray.JobFailedError, match=r"rank 0 .*, rank 1 .* did not return within 3 s"):
        bps_rdma.ray.run(ray_jobs.meets_an_end, plan(tmp_path, "hang"), hosts=2, timeout=3)


def test_a_function_that_nodes_cannot_import(two_nodes, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def train(config):\n    return config\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    with pytest.raises(bps_rdma.ray.JobFailedError, match="No module named 'only_here'") as raised:
        bps_rdma.ray.run(only_here.train)
    assert "working_dir" in raised.value.hint
    folder = {"env_vars": {"PYTHONPATH": f"{tmp_path}:{ray_jobs.os.environ['PYTHONPATH']}"}}
    assert bps_rdma.ray.run(only_here.train, 7, runtime_env=folder) == [7]


def test_an_environment_in_which_nothing_starts(two_nodes, tmp_path):
    (tmp_path / "bps_rdma.py").write_text("raise ImportError('this one is broken')")
    path = f"{tmp_path}:{ray_jobs.os.environ['PYTHONPATH']}"
    with pytest.raises(bps_rdma.ray.StartError, match=r"rank 0 .* did not start: .*this one is broken"):
        bps_rdma.ray.run(ray_jobs.sums, 1, env={"PYTHONPATH": path}, start_timeout=100)


@pytest.mark.long
@pytest.mark.parametrize("force", [[], ["--force"]], ids=str)
def test_ray_stop(force):
    """In a process namespace of its own: `ray stop` ends every Ray process that it sees."""
    alone = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this process may not make a process namespace")
    script = str(Path(__file__).with_name("ray_stop.py"))
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:  # a short name: Ray makes sockets in it
        done = subprocess.run(
            [*alone, sys.executable, "-P", script, folder, *force],
            check=False,
            capture_output=True,
            text=True,
            timeout=240 * ray_jobs.PATIENCE,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"RAY_TMPDIR": folder},
            cwd=folder,  # in a checkout actors would find the package without its native part
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["left"] == []
    assert found["knew"] - found["begun"] < SOON_S
    assert found["gone"] - found["begun"] < SOON_S

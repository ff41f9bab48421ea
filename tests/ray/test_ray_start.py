# SPDX-License-Identifier: Apache-2.0
"""Members that do not start, do not come, or do not return: errors that name them, and say why."""

import os
import re
import time
from pathlib import Path

import harness
import pytest
import ray_jobs

import bps_rdma.ray


def test_ranks_that_do_not_return_are_named(two_nodes, tmp_path):
    """And what they do: rank 1 sleeps, and rank 0 waits for it."""
    with pytest.raises(bps_rdma.ray.JobFailedError) as raised:
        bps_rdma.ray.run(
            ray_jobs.meets_an_end,
            ray_jobs.plan(tmp_path, "hang"),
            hosts=2,
            timeout=3 * harness.PATIENCE,
            start_timeout=100,
        )
    assert re.fullmatch(
        r"rank 0 \(pid \d+ on [\d.]+\), rank 1 \(pid \d+ on [\d.]+\) did not return within [\d.]+ s: "
        r"rank 0 waits in push_pull of 'x'.* \([\d.]+ s\); "
        r'rank 1 is in code of its own: File ".*/ray_jobs.py", line \d+ in end',
        raised.value.message,
    ), raised.value.message


@pytest.mark.long
def test_a_rank_that_is_stopped_and_one_that_is_in_no_job(two_nodes, tmp_path):
    said = r"within [\d.]+ s: rank 0 is in no job: .*; rank 1 is stopped"
    with pytest.raises(bps_rdma.ray.JobFailedError, match=said):
        bps_rdma.ray.run(ray_jobs.never_joins, 1, hosts=2, timeout=3 * harness.PATIENCE)


def test_a_member_that_is_missing_at_a_barrier(two_nodes):
    said, none = bps_rdma.ray.run(ray_jobs.is_late_for_a_barrier, 1, hosts=2)
    assert none is None
    assert said.startswith("the barrier of group 0 took longer than 0.5 s: rank 1 did not come"), said


FIRST_OF_ALL = """
import os, signal, sys, time
try:
    os.mkdir({folder!r})
except FileExistsError:
    sys.path.remove({path!r})
    del sys.modules["bps_rdma"]
    import bps_rdma
else:
    {does}
"""


@pytest.mark.parametrize(
    ("does", "limit", "said"),
    [
        ("time.sleep(600)", 8, r"^no answer from rank [01] \(on [\d.]+\) within \d+ s"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            100,
            r"^rank [01] \(on [\d.]+\) did not start: The actor .*process has died",
        ),
    ],
    ids=["hangs", "dies"],
)
def test_an_actor_does_not_start(two_nodes, tmp_path, does, limit, said):
    """That of the first rank to import bps_rdma."""
    here = str(tmp_path / "path")
    Path(here).mkdir()
    text = FIRST_OF_ALL.format(folder=str(tmp_path / "first"), path=here, does=does)
    Path(here, "bps_rdma.py").write_text(text)
    path = f"{here}:{os.environ['PYTHONPATH']}"
    begun = time.monotonic()
    with pytest.raises(bps_rdma.ray.StartError, match=said) as raised:
        bps_rdma.ray.run(ray_jobs.sums, 1, hosts=2, env={"PYTHONPATH": path}, start_timeout=limit * harness.PATIENCE)
    assert raised.value.message.count("rank") == 1
    assert time.monotonic() - begun < (2 * 8 + 5) * harness.PATIENCE


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

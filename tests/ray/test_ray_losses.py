# SPDX-License-Identifier: Apache-2.0
"""Jobs that go on without lost members, and those that take their place."""

import logging
import os
import signal
from pathlib import Path

import harness
import pytest
import ray_jobs
from ray.experimental import internal_kv

import bps_rdma.ray
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.ray.members import Actor, silent_nodes


def plan(folder: Path, last: int, end: str = "kill", rank: int = 1) -> dict:
    return {"folder": str(folder), "last": last, "end": end, "rank": rank}


def test_the_survivors_of_a_killed_rank_go_on(two_nodes, tmp_path, caplog):
    """Of rank 0, too."""
    with caplog.at_level(logging.WARNING, "bps_rdma.ray"):
        lost, *found = bps_rdma.ray.run(ray_jobs.survives, plan(tmp_path, 2, rank=0), hosts=3, min_workers=2)
    assert lost is None
    assert [(one["rank"], one["sizes"]) for one in found] == [(0, [3, 2]), (1, [3, 2])]
    assert all("worker 0" in one["texts"][0] for one in found)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("rank 0 (pid ")
    assert warning.endswith("; the job goes on with 2 of 3 ranks")


def test_a_new_actor_enters_the_running_job(two_nodes, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "bps_rdma.ray"):
        stayed, entered = bps_rdma.ray.run(ray_jobs.survives, plan(tmp_path, 2), hosts=2, min_workers=1, restarts=1)
    assert (stayed["rank"], stayed["sizes"]) == (0, [2, 1, 2])
    assert (entered["rank"], entered["sizes"]) == (1, [2])
    assert stayed["pid"] != entered["pid"]
    assert [record.getMessage().split("; ")[-1] for record in caplog.records] == [
        "the job goes on with 1 of 2 ranks, and it is started again"
    ]


@pytest.mark.long
def test_ranks_go_on_without_a_killed_server(two_nodes, tmp_path):
    found = bps_rdma.ray.run(ray_jobs.survives, plan(tmp_path, 2, "server"), hosts=2, servers=2, min_workers=2)
    assert [one["sizes"] for one in found] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("end", "servers"),
    [
        ("scheduler", 0),
        pytest.param("scheduler's actor", 0, marks=pytest.mark.long),
        pytest.param("scheduler's actor", 2, marks=pytest.mark.long),
    ],
)
def test_a_lost_scheduler_is_started_again(two_nodes, tmp_path, caplog, end, servers):
    with caplog.at_level(logging.WARNING, "bps_rdma.ray"):
        found = bps_rdma.ray.run(ray_jobs.survives, plan(tmp_path, 2, end), hosts=2, servers=servers, min_workers=1)
    assert [one["sizes"] for one in found] == [[2, 2], [2, 2]]
    assert all("the scheduler was lost and started again" in one["texts"][0] for one in found)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("scheduler (")
    assert warning.endswith("; it is started again")
    assert internal_kv._internal_kv_list(b"bps_rdma/") == []


@pytest.mark.long
def test_without_patience_the_job_ends_with_its_scheduler(two_nodes, tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING, "bps_rdma.ray"),
        pytest.raises(bps_rdma.ray.JobFailedError, match=r"^scheduler .*: bps-scheduler was killed by signal 9"),
    ):
        bps_rdma.ray.run(
            ray_jobs.survives,
            plan(tmp_path, 2, "scheduler"),
            hosts=2,
            min_workers=1,
            env={"BPS_SCHEDULER_PATIENCE": "0"},
        )
    assert not [record for record in caplog.records if "started again" in record.getMessage()]


@pytest.mark.long
def test_too_few_ranks_end_the_job(two_nodes, tmp_path):
    with pytest.raises(bps_rdma.ray.JobFailedError, match=r"^rank 1 .* raised ValueError: no such sample"):
        bps_rdma.ray.run(ray_jobs.survives, plan(tmp_path, 2, "raise"), hosts=2, min_workers=2)


@pytest.mark.long  # newcomers are waited for
def test_a_job_that_ends_before_a_new_actor_could_enter(two_nodes, tmp_path):
    stayed, late = bps_rdma.ray.run(ray_jobs.survives, plan(tmp_path, 1), hosts=2, min_workers=1, restarts=1)
    assert (stayed["sizes"], late) == ([2, 1], None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"hosts": 2, "min_workers": 3}, "min_workers is 3, and the job has 2 ranks"),
        ({"hosts": 2, "restarts": 1}, "restarts is 1, and min_workers is 0"),
    ],
)
def test_arguments_that_fit_no_job(asked, said):
    with pytest.raises(InvalidArgumentError, match=said):
        bps_rdma.ray.run(ray_jobs.survives, **asked)


def test_a_node_that_does_not_answer(two_nodes):
    third = two_nodes.add_node(num_cpus=1, object_store_memory=80_000_000)
    two_nodes.wait_for_nodes()
    asked = [Actor(f"rank {number}", node.node_id, None) for number, node in enumerate(two_nodes.list_all_nodes())]
    try:
        assert silent_nodes(asked, None) == set()
        raylet = third.all_processes["raylet"][0].process
        os.kill(raylet.pid, signal.SIGSTOP)
        try:
            harness.eventually(lambda: harness.has_stopped(raylet.pid), 30, "the stop of the node")
            assert silent_nodes(asked, None) == {third.node_id}
        finally:
            os.kill(raylet.pid, signal.SIGCONT)
    finally:
        two_nodes.remove_node(third, allow_graceful=False)
    assert silent_nodes(asked, None) <= {third.node_id}  # or Ray knows that already

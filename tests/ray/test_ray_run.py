# SPDX-License-Identifier: Apache-2.0
"""Jobs on a cluster: ranks and servers find their places and their identity, and results come back."""

import collections
import re
import secrets
import threading

import pytest
import ray
import ray_jobs

import bps_rdma.ray
from bps_rdma.errors import InvalidArgumentError


def test_servers_inside_the_ranks(two_nodes):
    found = bps_rdma.ray.run(ray_jobs.sums, 20, hosts=2, per_host=2, strict_spread=True)
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    assert [one["local"] for one in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert found[0]["node"] == found[1]["node"] != found[2]["node"] == found[3]["node"]
    assert len({one["pid"] for one in found}) == 4


def test_dedicated_servers_on_named_nodes(two_nodes):
    found = bps_rdma.ray.run(
        ray_jobs.sums, 20, hosts=2, servers=2, server_resources={"bps_server": 1}, env={"BPS_LOG_LEVEL": "info"}
    )
    assert [(one["rank"], one["size"], one["env"]["BPS_NUM_SERVERS"]) for one in found] == [(0, 2, "2"), (1, 2, "2")]


def test_a_scheduler_of_its_own(two_nodes):
    """Every rank is a server, and none of them hosts the scheduler."""
    found = bps_rdma.ray.run(ray_jobs.sums, 20, hosts=2, own_scheduler=True)
    assert [(one["rank"], one["size"], one["env"]["BPS_ROLE"]) for one in found] == [(0, 2, "joint"), (1, 2, "joint")]
    (alone,) = bps_rdma.ray.run(ray_jobs.sums, 1, own_scheduler=True)
    assert alone["size"] == 1


def test_an_actor_of_a_raylet_that_srun_started(two_nodes):
    """It has the variables of the task that the raylet is, and is no rank of Slurm."""
    task = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "RANK": "", "BPS_RANK": "", "DMLC_ROLE": "", "BPS_SECRET": "",
    }  # fmt: skip
    alone = ray.remote(num_cpus=0, runtime_env={"env_vars": task})(size_of_job)
    assert ray.get(alone.remote()) == 1


def test_the_secret_is_written_nowhere(two_nodes):
    """A word that the user passes to the same members by env is found where Ray writes: the test looks there."""
    word = secrets.token_hex(32)
    found = bps_rdma.ray.run(
        ray_jobs.looks_for_its_secret,
        hosts=2,
        servers=1,
        env={"BPS_LOG_LEVEL": "debug", "OF_THE_USER": word},
    )
    for one in found:
        assert len(one["secret"]) == 64
        assert one["in_command_lines"] == []
        assert word in one["runtime_env"]
        assert one["secret"] not in one["runtime_env"]
    assert len({one["secret"] for one in found}) == 1
    ray_jobs.await_text(word)
    assert ray_jobs.files_with(found[0]["secret"]) == []


def size_of_job() -> int:
    import bps_rdma

    bps_rdma.init()
    try:
        return bps_rdma.size()
    finally:
        bps_rdma.shutdown()


def test_the_environment_is_the_ranks_own(two_nodes):
    (one,) = bps_rdma.ray.run(ray_jobs.sums, 1, env={"OF_THE_USER": "yes", "OMP_NUM_THREADS": "3"})
    env = one["env"]
    assert "55" not in [env.get(name) for name in ("RANK", "BPS_RANK", "SLURM_PROCID")]
    assert "DMLC_ROLE" not in env
    assert "SLURM_PROCID" not in env
    assert env["BPS_SECRET"] != "of an outer job"
    assert (env["OF_THE_USER"], env["OMP_NUM_THREADS"]) == ("yes", "3")


def test_two_jobs_at_once(two_nodes):
    found = {}

    def start(name: str) -> None:
        found[name] = bps_rdma.ray.run(ray_jobs.sums, 50, per_host=2)

    threads = [threading.Thread(target=start, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    theirs = collections.Counter(one["env"]["BPS_SECRET"] for ranks in found.values() for one in ranks)
    assert sorted(theirs.values()) == [2, 2]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rank_resources": {"CPU": 1, "GPU": 1}}, "no node has {CPU: 1, GPU: 1}"),
        ({"hosts": 3, "strict_spread": True}, "3 nodes are needed, and there are 2"),
        # Fewer than 8, while Ray tries whether they are enough.
        ({"hosts": 3, "per_host": 3}, r"free now: {CPU: \d"),
    ],
)
def test_no_room(two_nodes, asked, said):
    ray_jobs.await_room()
    with pytest.raises(bps_rdma.ray.PlacementError) as raised:
        bps_rdma.ray.run(ray_jobs.sums, 1, start_timeout=0.5, **asked)
    assert "had no room for the job within 0.5 s" in str(raised.value)
    assert "{CPU: 4, bps_server: 2}" in str(raised.value)
    assert re.search(said, raised.value.hint)
    assert "group" not in raised.value.hint


def test_arguments_that_are_no_job():
    with pytest.raises(InvalidArgumentError, match="are no job"):
        bps_rdma.ray.run(ray_jobs.sums, hosts=0)
    with pytest.raises(InvalidArgumentError, match="name at least one resource"):
        bps_rdma.ray.run(ray_jobs.sums, server_resources={})

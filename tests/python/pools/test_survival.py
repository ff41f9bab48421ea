# SPDX-License-Identifier: Apache-2.0
"""Jobs survive the end of their pool, the next pool counts them, and pools survive what happens to jobs."""

import os
import signal

import harness
import pytest
from pool_daemon import Daemon, await_no_server


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_job_goes_on_without_its_pool_and_the_next_pool_counts_it(make_pool, make_job, signum):
    """SIGKILL in the middle of rounds, and SIGTERM as systemd restarts a unit with KillMode=process."""
    pool = make_pool(BPS_POOL_CORES="2")
    job = make_job(pool, "alice", BPS_SERVER_ENGINE_THREAD="2", BPS_JOB_ID="")
    job.await_steps()
    (server,) = pool.servers()
    assert pool.end(signum) == (0 if signum == signal.SIGTERM else -signum)
    job.await_steps()
    pool.start()
    assert "runs already: it keeps 2 cores and 256 MiB" in pool.command.output()
    seen = pool.shown_to("alice")
    assert (seen["cores_taken"], seen["jobs"][0]["pid"], seen["jobs"][0]["state"]) == (2, server, "running")
    assert seen["jobs"][0]["memory_used"] > 0
    refused = make_job(pool, "bob", BPS_PLACEMENT="auto")
    refused.finish()
    assert "2 of its 2 cores are taken" in refused.output()
    job.await_steps()
    assert pool.servers() == [server]
    job.finish()
    await_no_server(pool)
    harness.eventually(lambda: pool.shown_to("alice")["jobs_taken"] == 0)


@pytest.mark.long
def test_a_server_that_was_taken_over_can_be_ended(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    pool.end(signal.SIGKILL)
    pool.start()
    name = pool.shown_to("alice")["jobs"][0]["job"]
    done = harness.run_command([harness.binary("bps"), "pool", "--end", name], env=pool.as_user("alice"))
    assert "it is ended" in done.stderr
    await_no_server(pool, 10)
    assert job.command.wait(60 * harness.PATIENCE) not in (0, None)
    assert f"the server of {pool.name} was ended by user alice" in job.output()


@pytest.mark.long
def test_another_pool_of_this_machine_leaves_it_alone(make_pool, make_job):
    first = make_pool()
    job = make_job(first, "alice")
    job.await_steps()
    second = make_pool()
    assert second.shown_to("alice")["jobs_taken"] == 0
    second.end(signal.SIGINT)
    job.finish()


def test_ctrl_c_ends_a_pool_and_its_servers(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    assert pool.end(signal.SIGINT) == 128 + signal.SIGINT
    assert not pool.servers()
    assert job.command.wait(60 * harness.PATIENCE) not in (0, None)


def test_sighup_reads_the_keys_again(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    pool.write_keys("bob")
    pool.command.kill(signal.SIGHUP)
    harness.eventually(lambda: "the keys have been read again" in pool.command.output())
    late = make_job(pool, "alice", BPS_PLACEMENT="auto")
    late.finish()
    assert "does not know the user alice with this key" in late.output()
    job.finish()  # what runs goes on
    pool.write_keys("alice", "alice")
    pool.command.kill(signal.SIGHUP)
    harness.eventually(lambda: "the keys are what they were: " in pool.command.output())
    assert pool.shown_to("bob")["jobs_taken"] == 0


def test_a_pool_survives_the_death_of_a_server(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    (server,) = pool.servers()
    os.kill(server, signal.SIGKILL)
    assert job.command.wait(60 * harness.PATIENCE) not in (0, None)
    assert f"the server of {pool.name} was killed by signal 9" in job.output()
    again = make_job(pool, "alice")
    again.await_steps()
    again.finish()


def test_a_job_that_can_survives_the_death_of_a_pools_host(make_pool, make_job):
    """With two pools, of which one and its server are gone."""
    pools = [make_pool(), make_pool()]
    names = f"{pools[0].name},{pools[1].name}"
    job = make_job(pools[0], "alice", "--min-np", "2", "--pool", names)
    job.await_steps()
    assert [len(pool.servers()) for pool in pools] == [1, 1]
    die(pools[0])
    job.await_steps()
    job.finish()


def die(pool: Daemon) -> None:
    servers = pool.servers()
    pool.command.kill(signal.SIGKILL)
    for pid in servers:
        os.kill(pid, signal.SIGKILL)


def test_a_job_that_lies_about_its_size_is_ended_and_told_why(make_pool, make_job, tmp_path):
    """It asks for 64 MiB, and has its server keep more weights than fit."""
    pool = make_pool()
    honest = make_job(pool, "bob")
    honest.await_steps()
    script = tmp_path / "lies.py"
    script.write_text(LIES)
    words = [harness.binary("bps"), "run", "-np", "1", str(script)]
    env = pool.as_user("alice", BPS_SERVER_MEMORY=str(64 << 20), BPS_TIMEOUT="60")
    done = harness.run_command(words, env=env, cwd=tmp_path, within=120)
    assert done.returncode != 0, done.stderr
    assert "MiB of memory, more than the 64 MiB that it may have" in done.stderr
    (ended,) = pool.shown_to("alice")["ended"]
    assert "more than the 64 MiB" in ended["why"]
    honest.await_steps()
    honest.finish()


LIES = """
import numpy as np
import bps_rdma as bps
bps.init()
for number in range(1000):
    bps.store(np.ones(4_000_000, np.float32), name=f"x{number}")
"""

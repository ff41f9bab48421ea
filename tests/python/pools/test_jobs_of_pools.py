# SPDX-License-Identifier: Apache-2.0
"""Jobs get servers of pools, each its own, or the reason why not; a server ends with its job."""

import json
import os
import signal
import sys
from pathlib import Path

import harness
import pytest
from pool_daemon import Daemon, await_no_server, scrape


def test_two_jobs_at_once_have_a_server_each(pool, make_job):
    jobs = [make_job(pool, user) for user in ("alice", "bob")]
    for job in jobs:
        job.await_steps()
    assert len(pool.servers()) == 2
    seen = pool.shown_to("alice")
    assert (seen["jobs_taken"], seen["cores_taken"], seen["memory_taken"] >> 20) == (2, 2, 512)
    assert [one["user"] for one in seen["jobs"]] == ["alice"]
    assert seen["jobs"][0]["memory_used"] > 0
    assert {one["user"] for one in pool.shown_to("operator")["jobs"]} == {"alice", "bob"}
    for job in jobs:
        text = job.finish()
        assert f"a server of {pool.name} has 1 core and 256 MiB for this job" in text
        assert "rank 1 has summed with 1 servers" in text
    await_no_server(pool)
    harness.eventually(lambda: pool.shown_to("alice")["jobs_taken"] == 0, what="that the pool has heard of it")
    assert "ended with status 0" in pool.command.output()


def test_each_server_keeps_to_cores_memory_and_secret_of_its_own(make_pool, make_job):
    pool = make_pool(BPS_POOL_CORES=str(len(os.sched_getaffinity(0))), BPS_POOL_JOBS="2")
    jobs = [make_job(pool, user, BPS_SERVER_ENGINE_THREAD="1") for user in ("alice", "bob")]
    for job in jobs:
        job.await_steps()
    first, second = pool.servers()
    if len(os.sched_getaffinity(0)) > 1:
        assert not os.sched_getaffinity(first) & os.sched_getaffinity(second)
    for pid in (first, second):
        proc = Path(f"/proc/{pid}")
        assert len(os.sched_getaffinity(pid)) == 1
        assert os.getsid(pid) == pid
        assert b"BPS_SECRET" not in (proc / "environ").read_bytes()
        assert (proc / "cmdline").read_bytes() == b"bps-server\0--pooled\0"
        data = next(line for line in (proc / "limits").read_text().splitlines() if line.startswith("Max data size"))
        assert int(data.split()[3]) == (512 + 512) << 20  # its share, and what is mapped and not used
    for job in jobs:
        job.finish()


def test_a_full_pool_says_so_with_numbers_and_the_job_goes_on(make_pool, make_job):
    pool = make_pool(BPS_POOL_CORES="2")
    first = make_job(pool, "alice", BPS_SERVER_ENGINE_THREAD="2")
    first.await_steps()
    second = make_job(pool, "bob", BPS_PLACEMENT="auto")
    second.await_steps()
    text = second.finish()
    assert (
        f"note: no server of {pool.name}: the pool at {pool.name}: the pool is full: 2 of its 2 cores are taken, and "
        "the job asks for 1" in text
    )
    assert "goes on without servers of pools" in text
    first.finish()


@pytest.mark.parametrize(
    ("limit", "asked", "why"),
    [
        ({"BPS_POOL_JOBS": "1"}, {}, "it serves 1 job, which is its limit"),
        ({"BPS_POOL_USER_JOBS": "1"}, {}, "it serves 1 job of the user alice, which is the limit"),
        ({}, {"BPS_SERVER_MEMORY": str(900 << 20)}, "256 of its 1024 MiB are taken, and the job asks for 900 MiB"),
        ({"BPS_POOL_JOB_CORES": "1"}, {"BPS_SERVER_ENGINE_THREAD": "2"}, "a job may have 1 core of this pool"),
    ],
)
def test_limits_of_pool_user_and_job(make_pool, limit, asked, why):
    """Without jobs: reservations count as well."""
    pool = make_pool(**limit)
    script = """
import os, sys
import bps_rdma
from bps_rdma.launch.pools import Lent, parse_pools
names = parse_pools(os.environ["BPS_POOL"])
first, second = Lent("a"), Lent("b")
first.ask(names, os.environ)
os.environ.update(eval(sys.argv[1]))
second.ask(names, os.environ)
print(first.count, second.count)
"""
    done = harness.run_command([sys.executable, "-c", script, repr(asked)], env=pool.as_user("alice"))
    assert done.stdout.split() == ["1", "0"], done.stderr
    assert why in done.stderr
    harness.eventually(lambda: pool.shown_to("alice")["jobs_taken"] == 0, what="the end of reservations")


def test_a_wait_without_end_is_refused(pool, make_job):
    job = make_job(pool, "alice", BPS_JOIN_TIMEOUT="inf", BPS_PLACEMENT="auto")
    said = job.finish()
    assert "BPS_JOIN_TIMEOUT=inf is more than the 600 seconds that a pool waits for a job" in said
    assert "the job goes on without" in said
    assert not pool.servers()


def test_pools_that_are_not_there_are_named(make_job, pool):
    job = make_job(pool, "alice", "--pool", f"127.0.0.1:{harness.free_port()},{pool.name}")
    job.await_steps()
    text = job.finish()
    assert "note: no server of 127.0.0.1:" in text
    assert "has summed with 1 servers" in text


def test_own_servers_and_those_of_a_pool_sum_together(pool, make_job):
    job = make_job(pool, "alice", "--servers", "1")
    job.await_steps()
    assert "has summed with 2 servers" in job.finish()


@pytest.mark.parametrize("whose", ["scheduler", "launcher"])
def test_a_server_ends_when_its_scheduler_is_gone(pool, make_job, whose):
    job = make_job(pool, "alice")
    job.await_steps()
    children = Path(f"/proc/{job.command.pid}/task/{job.command.pid}/children").read_text().split()
    (scheduler,) = [int(one) for one in children if Path(f"/proc/{one}/comm").read_text() == "bps-scheduler\n"]
    os.kill(scheduler if whose == "scheduler" else job.command.pid, signal.SIGKILL)
    await_no_server(pool, 15)
    harness.eventually(lambda: pool.shown_to("alice")["jobs_taken"] == 0)
    assert "ended with status 1" in pool.command.output()


def test_a_server_ends_with_a_job_that_fails_or_is_interrupted(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    job.command.kill(signal.SIGINT)
    assert job.command.wait(20 * harness.PATIENCE) == 128 + signal.SIGINT
    await_no_server(pool, 5)


def test_a_server_whose_job_never_comes_gives_up(pool):
    script = """
import os
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.pools import Lent, parse_pools
job = LocalJob(1)
lent = Lent(job.name)
lent.ask(parse_pools(os.environ["BPS_POOL"]), os.environ)
lent.begin(lent.given_to(job), os.environ)
"""
    env = pool.as_user("alice", BPS_JOIN_TIMEOUT="2")
    done = harness.run_command([sys.executable, "-c", script], env=env)
    assert done.returncode == 0, done.stderr
    harness.eventually(lambda: "starts with 1 core" in pool.command.output())
    await_no_server(pool)
    (ended,) = harness.eventually(lambda: pool.shown_to("alice")["ended"], what="that the pool has heard of it")
    assert ended["why"] == "ended with status 1"


def test_metrics_of_pool_and_jobs(make_pool, make_job):
    port = harness.free_ports(6)
    pool = make_pool(BPS_METRICS_PORT=str(port))
    job = make_job(pool, "alice")
    job.await_steps()
    text = scrape(port)
    assert "bps_pool_jobs 1" in text
    assert "bps_pool_cores_limit 4" in text
    assert 'bps_pool_job_cores{user="alice",job="run-' in text
    assert 'bps_pool_job_memory_limit_bytes{user="alice",job="run-' in text
    assert 'role="server"' in scrape(port + 1)  # the server's own
    job.finish()
    await_no_server(pool)
    harness.eventually(lambda: "bps_pool_jobs 0" in scrape(port))
    assert "bps_pool_started_servers_total 1" in scrape(port)


def test_what_people_see(pool: Daemon, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    done = harness.run_command([harness.binary("bps"), "pool"], env=pool.as_user("alice"))
    assert f"{pool.name}: 1 of 4 jobs, 1 of 4 cores, 256 of 1024 MiB; load" in done.stdout
    assert "running" in done.stdout
    job.finish()
    missing = harness.run_command([harness.binary("bps"), "pool"], env=harness.clean_env())
    assert (missing.returncode, "no pool is named" in missing.stderr) == (2, True)
    broken = harness.run_command([harness.binary("bps"), "pool", "a:b", "--json"], env=pool.as_user("alice"))
    assert "'a:b' is not a pool" in broken.stderr
    gone = harness.run_command([harness.binary("bps"), "pool", "127.0.0.1:1", "--json"], env=pool.as_user("alice"))
    assert gone.returncode == 1
    assert "127.0.0.1:1" in json.loads(gone.stdout)[0]["error"]

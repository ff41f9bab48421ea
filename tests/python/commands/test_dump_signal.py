# SPDX-License-Identifier: Apache-2.0
"""SIGUSR1 to a rank or a server shows what it waits for, and where its threads are; and changes nothing else."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark


def hangs_in_python(bps: Any) -> float:
    """Rank 0 waits for rank 1, whose main thread waits for something else."""
    mark("running")
    if bps.rank() == 1:
        this_is_where_rank_1_hangs()
    return float(bps.push_pull(np.ones(8, np.float32), average=False, name="late")[0])


def this_is_where_rank_1_hangs() -> None:
    await_mark("go on")


def until_it_tells(job: harness.Job, member: str, what: str) -> None:
    """Asks a member again and again, until it has told of that."""

    def tells() -> bool:
        job.kill(member, signal.SIGUSR1)
        time.sleep(0.1)
        return any(dump[what] for dump in job.dumps(member))

    harness.eventually(tells)


def test_ranks_and_servers_tell_what_they_wait_for(transport):
    with harness.start(hangs_in_python, workers=2, servers=1, env=harness.over(transport)) as job:
        job.await_marks("running")
        until_it_tells(job, "rank 0", "operations")
        for member in ("rank 1", "server 0"):
            job.kill(member, signal.SIGUSR1)
            harness.eventually(lambda member=member: job.dumps(member))
        job.set_mark("go on")
        assert job.results() == [2, 2]
        assert "hangs_in_python" in job.log("rank 0")
        assert "this_is_where_rank_1_hangs" in job.log("rank 1")
        (operation,) = next(dump for dump in job.dumps("rank 0") if dump["operations"])["operations"]
        assert operation["operation"] == "push_pull of 'late', round 0"
        (open_round,) = job.dumps("server 0")[0]["rounds"]
        assert (open_round["waits_for"], open_round["missing"]) == ("pushes", [1])


def one_is_late(bps: Any) -> bool:
    group = bps.new_group([1], name="alone") if bps.rank() == 1 else None
    mark("running")
    if bps.rank() == 1:
        this_is_where_rank_1_hangs()
    bps.barrier()
    return group is None


def test_the_scheduler_tells_who_is_missing_and_goes_on():
    with harness.start(one_is_late, workers=2, servers=1) as job:
        job.await_marks("running")
        until_it_tells(job, "scheduler", "calls")
        dump = job.dumps("scheduler")[-1]
        assert (dump["role"], dump["phase"]) == ("scheduler", "running")
        assert dump["calls"] == [{"what": "barrier of group 0", "ranks": [0], "missing": [1]}]
        assert {(one["rank"], one["server_rank"]) for one in dump["members"]} == {(-1, 0), (0, -1), (1, -1)}
        assert [(one["name"], one["ranks"]) for one in dump["groups"]] == [("", [0, 1]), ("alone", [1])]
        job.set_mark("go on")
        assert job.results() == [True, False]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 128 + signal.SIGINT)])
def test_a_scheduler_that_has_told_ends_by_signals_as_ever(signum: int, status: int, tmp_path: Path):
    env = harness.clean_env(DMLC_NUM_WORKER="1", DMLC_NUM_SERVER="1", DMLC_PS_ROOT_URI="127.0.0.1")
    env |= {"DMLC_PS_ROOT_PORT": str(harness.free_port()), "BPS_SECRET": "it is one"}
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen([harness.binary("bps-scheduler")], env=env, stderr=out) as scheduler:
        try:
            harness.eventually(lambda: "waiting for" in log.read_text())
            for number in (1, 2):
                scheduler.send_signal(signal.SIGUSR1)
                harness.eventually(lambda number=number: log.read_text().count("bps DUMP ") == number)
            scheduler.send_signal(signum)
            assert scheduler.wait(20 * harness.PATIENCE) == status
        finally:
            scheduler.kill()
    first = json.loads(log.read_text().partition("bps DUMP ")[2].splitlines()[0])
    assert (first["phase"], first["members"]) == ("gathering", [])
    assert "0 of 1 worker" in first["missing"]


def handles_it_itself(bps: Any) -> list[int]:
    taken: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, _: taken.append(signum))
    bps.init()
    os.kill(os.getpid(), signal.SIGUSR1)
    bps.barrier()
    bps.shutdown()
    os.kill(os.getpid(), signal.SIGUSR1)
    return taken


def test_a_handler_of_the_program_stays():
    with harness.start(handles_it_itself, workers=2, init=False) as job:
        assert job.results() == [[signal.SIGUSR1] * 2] * 2
        assert "bps DUMP" not in job.log("rank 0")


def lives_and_forks(bps: Any) -> int:
    for _ in range(2):
        bps.init()
        bps.push_pull(np.ones(8, np.float32), name="x")
        bps.shutdown()
    os.kill(os.getpid(), signal.SIGUSR1)  # without a job: nothing to tell
    bps.init()
    bps.push_pull(np.ones(8, np.float32), name="x")
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    bps.barrier()
    bps.shutdown()
    return status


def test_lives_of_one_process_and_a_forked_child():
    with harness.start(lives_and_forks, workers=2, init=False) as job:
        assert job.results() == [7, 7]
        assert not job.dumps("rank 0")

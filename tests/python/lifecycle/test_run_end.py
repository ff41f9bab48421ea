# SPDX-License-Identifier: Apache-2.0
"""How `bps run --min-np` ends: with the job, and without leaving anything behind."""

import signal
from pathlib import Path

import harness
import pytest

# Rank 1 is lost after a step, or when the job is over. If it is started again, it comes when the job is over.
PROGRAM = """
import os, pathlib, signal, socket, sys, time
import numpy as np
import bps_rdma as bps

def until_the_scheduler_has_ended():
    while True:
        try:
            socket.create_connection((os.environ["BPS_ROOT_URI"], int(os.environ["BPS_ROOT_PORT"]))).close()
        except OSError:
            return
        time.sleep(0.01)

when = sys.argv[1]
is_again = pathlib.Path("lost").exists()
if is_again:
    print("comes again", flush=True)
    pathlib.Path("again").touch()
    until_the_scheduler_has_ended()
bps.init()
committed = 0
while committed < 5:
    try:
        bps.push_pull(np.ones(8, np.float32), name="x")
        bps.commit()
    except bps.RoundAbortedError:
        continue
    committed += 1
    while when == "early" and committed == 4 and not pathlib.Path("again").exists():
        time.sleep(0.01)  # else the job may be over before the launcher has heard of the loss
    if when == "early" and bps.rank() == 1 and committed == 2 and bps.size() == 3:
        pathlib.Path("lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
rank = bps.rank()
bps.shutdown()
if when == "late" and rank == 1:
    until_the_scheduler_has_ended()
    pathlib.Path("lost").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("when", "where"), [("early", ["-np", "3"]), ("late", ["-np", "3"]), ("early", ["-H", "localhost:3"])]
)
def test_a_rank_that_comes_too_late_is_not_waited_for(tmp_path: Path, when: str, where: list[str]) -> None:
    script = tmp_path / "rank.py"
    script.write_text(PROGRAM)
    words = [harness.binary("bps"), "run", *where, "--min-np", "2", "--restarts", "3", str(script), when]
    env = harness.clean_env(BPS_JOIN_TIMEOUT="600", BPS_TIMEOUT="600", BPS_SHUTDOWN_TIMEOUT="600")
    ended = harness.run_command(words, env=env, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "the job is over" in ended.stderr
    # The launcher may hear of a late loss before it hears of the scheduler's end.
    assert ended.stdout.count("comes again") in ([1] if when == "early" else [0, 1])


def test_a_launcher_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    script = tmp_path / "rank.py"
    script.write_text("import pathlib, time\npathlib.Path('runs').touch()\ntime.sleep(600)\n")
    words = [harness.binary("bps"), "run", "-np", "1", "--min-np", "1", str(script)]
    with harness.Members() as members:
        members.command("launcher", words, harness.clean_env(TMPDIR=str(folder)), cwd=tmp_path)
        members.eventually((tmp_path / "runs").exists, what="the start of the rank")
        harness.eventually(lambda: list(folder.glob("*/scheduler")), what="the file of the scheduler")
        members.kill("launcher", signal.SIGKILL)
        harness.eventually(lambda: not list(folder.iterdir()), what="the end of the folder")

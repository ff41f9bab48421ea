# SPDX-License-Identifier: Apache-2.0
"""`bps run --min-np` goes on without a dedicated server that is lost, and with --restarts starts it again."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest

from bps_rdma.launch.process import Children
from bps_rdma.launch.run import Members

PROGRAM = """
import os, pathlib, signal, sys
import numpy as np
import bps_rdma as bps
from bps_rdma import job

def kill_server():
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        if name.endswith("(bps-server") and int(fields.split()[1]) == os.getppid():
            os.kill(int(stat.parent.name), signal.SIGKILL)
            return

bps.init()
back = int(sys.argv[1])  # servers in the last view
committed, after, told = 0, 0, 0
while after < 10:
    try:
        view = job.current().process
        ready = np.float32([view.epoch > 1 and view.servers == back])
        ready = bps.push_pull(ready, name="ready", average=False)
        assert (bps.push_pull(np.ones(50_000, np.float32), name="x", average=False) == bps.size()).all()
        bps.commit()
    except bps.RoundAbortedError:
        told += 1
        continue
    committed += 1
    after += ready[0] == bps.size()
    if committed == 10 and bps.rank() == 0:
        kill_server()
sys.stdout.write(f"told {told} times\\n")
bps.shutdown()
"""


def launch(tmp_path: Path, back: int, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "rank.py"
    script.write_text(PROGRAM)
    words = [harness.binary("bps"), "run", "-np", "2", "--min-np", "1", "--servers", "2", *options, str(script)]
    return harness.run_command([*words, str(back)], env=harness.clean_env(**env), cwd=tmp_path)


@pytest.mark.parametrize("failover", ["0", "1"])
def test_a_lost_server_is_started_again(tmp_path: Path, failover: str) -> None:
    ended = launch(tmp_path, 2, "--restarts", "1", BPS_SERVER_FAILOVER=failover)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "was killed by SIGKILL; the job goes on with 1 server, and it is started again" in ended.stderr
    if failover == "1":
        assert ended.stdout == "told 0 times\n" * 2, "nobody notices that a server is lost, or enters"


def test_without_restarts_the_other_server_is_enough(tmp_path: Path) -> None:
    ended = launch(tmp_path, 1, BPS_SERVER_FAILOVER="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Others write on the same line, and the launcher may hear of the loss when the ranks have ended the job.
    assert re.search(r"was killed by SIGKILL; the job (goes on|is over,) with 1 server", ended.stderr), ended.stderr
    assert "started again" not in ended.stderr


def test_the_last_server_ends_the_job(tmp_path: Path) -> None:
    ended = launch(tmp_path, 2, "--servers", "1", BPS_SERVER_FAILOVER="1")
    assert ended.returncode != 0
    assert "server 0 (pid" in ended.stderr, ended.stderr


def test_what_was_killed_is_seen_before_what_ended_for_it() -> None:
    """The scheduler ends because of a lost server, and the launcher hears of both at once."""
    with Children(prefixed=False) as children:
        scheduler = children.spawn("scheduler", ["false"], {})
        rank = children.spawn("rank 0", ["false"], {})
        server = children.spawn("server 0", ["sh", "-c", "kill -9 $$"], {})
        both: Any = SimpleNamespace(child=scheduler)
        job: Any = None
        for child in (scheduler, rank, server):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        members = Members(children, job, [], [rank], [server], both, 0)
        assert [child.label for child in members.wait()] == ["server 0", "rank 0", "scheduler"]


ENTERS = """
import os, signal, sys
import numpy as np
import bps_rdma as bps

again = os.path.exists("lost")
bps.init()
committed, after, told = 0, 0, 0
while after < 10:
    try:
        size = bps.size()
        through = np.float32([committed >= 20 and size == 3])
        through = bps.push_pull(through, name="through", average=False)
        assert (bps.push_pull(np.ones(50_000, np.float32), name="x", average=False) == size).all()
        bps.commit()
    except bps.RoundAbortedError:
        told += 1
        continue
    committed += 1
    after += through[0] >= 2  # those that were there before count more steps than the one that enters
    if committed == 20 and bps.rank() == 1 and not again:
        open("lost", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"told {told} times\\n")
bps.shutdown()
"""


@pytest.mark.parametrize("failover", ["0", "1"])
def test_a_lost_rank_enters_again(tmp_path: Path, failover: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(ENTERS)
    words = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", "--servers", "2", "--restarts", "1"]
    ended = harness.run_command(
        [*words, str(script)], env=harness.clean_env(BPS_SERVER_FAILOVER=failover), cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Each of the others hears once of the loss, and once of the rank that enters.
    assert sorted(ended.stdout.splitlines()) == ["told 0 times", "told 2 times", "told 2 times"], ended.stdout

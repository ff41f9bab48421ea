# SPDX-License-Identifier: Apache-2.0
"""What is told of a job whose ranks are containers that share the network: in each of them the rank is process 1."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest

from bps_rdma.tools.inspection.diagnosis import diagnose
from bps_rdma.tools.inspection.job_state import gather

BPS = harness.binary("bps")
ASIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or harness.run_command([*ASIDE, "true"]).returncode != 0,
    reason="needs namespaces of process ids, which only root can make",
)
WAITS = """
import os, sys, pathlib, time, bps_rdma as bps
import numpy as np
here = pathlib.Path(sys.argv[1])

def this_is_where_it_hangs():
    while not (here / "go on").exists(): time.sleep(0.01)

bps.init()
bps.push_pull(np.ones(3, np.float32), name="x")
assert os.getpid() == 1
(here / f"rank {bps.rank()} has summed").touch()
if bps.rank() == 1: this_is_where_it_hangs()
bps.push_pull(np.ones(3, np.float32), name="w")
bps.shutdown()
"""
FAILS = """
import sys, pathlib, time, bps_rdma as bps
import numpy as np
here = pathlib.Path(sys.argv[1])
bps.init()
try: bps.push_pull(np.ones(3, np.float32), name=f"of rank {bps.rank()}", timeout=1)
except bps.DeadlineError: (here / f"rank {bps.rank()} has failed").touch()
while len(list(here.glob("rank * has failed"))) < 2: time.sleep(0.01)
bps.shutdown()
"""


class Containers(harness.Members):
    """A job of which each rank runs in one."""

    name = ""

    def start(self, script: str, workers: int = 2, first: int = 0, **env: str) -> None:
        """Those from `first` on."""
        self.name, port = f"containers-{os.getpid()}-{harness.free_port()}", harness.free_port()
        for rank in range(first, workers):
            variables = harness.clean_env(**harness.of_rank(rank, workers, port), BPS_JOB_ID=self.name, **env)
            words = [*ASIDE, sys.executable, "-c", script, str(self.folder)]
            self.command(f"rank {rank}", words, variables, cwd="/")

    def begin(self) -> None:
        """Starts one in which rank 0 waits for rank 1."""
        self.start(WAITS, BPS_HEARTBEAT_TIMEOUT=str(100 * harness.PATIENCE))
        self.eventually(lambda: len(list(self.folder.glob("rank * has summed"))) == 2, what="the first sum")

    def process_1(self, rank: int) -> int:
        """Its number out here."""
        pid = self.pid(f"rank {rank}")
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def asked(self, command: str, inside: int | None) -> Any:
        """The answer of `bps COMMAND` out here, or in the container of a rank."""
        within = ["nsenter", "--target", str(self.process_1(inside)), "--pid", "--mount"] if inside is not None else []
        done = harness.run_command([*within, BPS, *command.split(), "--json", "--job", self.name])
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def finish(self) -> None:
        (self.folder / "go on").touch()
        self.succeed()


@pytest.fixture
def containers() -> Iterator[Containers]:
    with Containers() as members:
        yield members


# The container of rank 0 has the scheduler, too; the other one has to ask both.
@pytest.mark.parametrize("inside", [None, pytest.param(0, marks=pytest.mark.long), 1])
def test_both_ranks_are_shown_and_told_apart(containers: Containers, inside: int | None) -> None:
    containers.begin()
    containers.eventually(
        lambda: containers.asked("why", inside)[0], what="the wait of rank 0", until=lambda found: found["culprits"]
    )
    (found,) = containers.asked("why", inside)
    assert (found["kind"], [one["rank"] for one in found["culprits"]]) == ("rank", [1]), found["text"]
    assert "this_is_where_it_hangs" in found["stacks"]["rank 1"], found
    rows = containers.asked("top --once", inside)["members"]
    assert [(row["name"], row["pid"], row["state"]) for row in rows] == [
        ("rank 0 + server 0", 1, "waiting"), ("rank 1 + server 1", 1, "running")
    ]  # fmt: skip
    containers.finish()
    assert "Address already in use" not in containers.report()


@pytest.mark.parametrize("inside", [0, 1])
def test_a_stopped_process_is_that_of_this_container(containers: Containers, inside: int) -> None:
    containers.begin()
    os.kill(containers.process_1(0), signal.SIGSTOP)
    harness.eventually(lambda: harness.has_stopped(containers.process_1(0)), what="the stop")
    (found,) = containers.asked("why", inside)
    os.kill(containers.process_1(0), signal.SIGCONT)
    assert [one["rank"] for one in found["culprits"]] == [0], found["text"]
    assert ("kill -CONT 1" in found["text"]) == (inside == 0), found["text"]
    containers.finish()


def test_those_that_have_not_joined_are_counted(containers: Containers) -> None:
    """Rank 0, which has the scheduler, never comes."""
    containers.start(WAITS, workers=3, first=1)
    containers.eventually(
        lambda: [diagnose(state).text for state in gather() if state.name == containers.name], what="both",
        until=lambda texts: texts and "2 process(es) of this machine look for the scheduler" in texts[0],
    )  # fmt: skip
    containers.end(with_children=True)


def test_each_leaves_a_file_of_its_own(containers: Containers, tmp_path: Path) -> None:
    containers.start(FAILS, BPS_DUMP_DIR=str(tmp_path))
    containers.succeed()
    assert {json.loads(file.read_text())["rank"] for file in tmp_path.glob("*.json")} == {0, 1}

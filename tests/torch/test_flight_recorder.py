# SPDX-License-Identifier: Apache-2.0
"""torch's own analysis of flight recorders reads `bps dump --torch`, and names the rank that is missing."""

import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

pytest.importorskip("torch.distributed.flight_recorder")

COMMAND = [sys.executable, "-P", "-m", "bps_rdma"]
ANALYSIS = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]


def hangs(bps: Any, late: str) -> str:
    """Rank 1 does not come to the operation of that name; more than the recorders keep lie before it."""
    pair = bps.new_group([0, 1], name="pair") if bps.rank() != 2 else None
    for step in range(100):
        bps.push_pull(np.ones(6, np.float32), name="gradient")
        if step % 10 == 0 and bps.rank() != 2:
            bps.broadcast(np.ones(3, np.int64), root=0, name="flags", group=pair)
    mark("ready")
    if bps.rank() == 1:
        await_mark("go on")
    else:
        threading.Thread(target=tell_wait, args=(bps, late), daemon=True).start()
    if late == "barrier":
        bps.barrier()
    else:
        bps.push_pull(np.ones(5, np.float32), name=late)
    return "done"


def tell_wait(bps: Any, late: str) -> None:
    """Sets a mark when this rank waits in that operation."""

    def waits() -> bool:
        dump = bps.dump()
        return any(late in str(one) for one in [*dump["operations"], *dump["calls"]])

    harness.eventually(waits)
    mark("waits")


def analyse(folder: Path) -> tuple[str, Any]:
    """What torch prints, and its database."""
    output = folder.parent / "database"
    done = harness.run_command([*ANALYSIS, str(folder), "-o", str(output)])
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, pickle.loads(output.read_bytes())[1]


@pytest.mark.parametrize("late", ["last", pytest.param("barrier", marks=pytest.mark.long)])
def test_torch_names_the_missing_rank(late: str, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with harness.start(hangs, late, workers=3) as job:
        job.await_marks("ready")
        job.await_marks("waits", [0, 2])
        done = harness.run_command([*COMMAND, "dump", "--torch", str(folder), "--job", job.name])
        assert done.returncode == 0, done.stderr
        assert "3 files written" in done.stderr
        said, found = analyse(folder)
        assert "missing ranks: {1}" in said
        job.set_mark("go on")
        assert job.results() == ["done"] * 3
    (last,) = [one for one in found.collectives if one.missing_ranks]
    assert last.collective_state == "started"
    assert last.missing_ranks == {1}
    assert last.expected_ranks == {0, 1, 2}
    assert last.collective_name == ("gloo:barrier" if late == "barrier" else "gloo:all_reduce")
    before = [one for one in found.collectives if one is not last]
    assert all(one.pass_check and not one.missing_ranks for one in before)
    assert {(one.collective_name, one.pg_desc) for one in before} == {
        ("gloo:all_reduce", "0:all workers"), ("gloo:broadcast", "1:group 1")
    }  # fmt: skip
    assert {one.collective_state for one in before} == {"completed"}
    assert len(before) > 40
    assert {(one.desc, one.size) for one in found.groups} == {("all workers", 3), ("group 1", 2)}


def test_a_rank_that_does_not_reply_is_said_and_a_part_is_analysed(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    # A rank that is stopped for long is not lost.
    with harness.start(hangs, "last", workers=3, servers=1, env={"BPS_HEARTBEAT_TIMEOUT": "100"}) as job:
        job.await_marks("ready")
        job.kill("rank 1", signal.SIGSTOP)
        done = harness.run_command([*COMMAND, "dump", "--torch", str(folder), "--job", job.name])
        job.kill("rank 1", signal.SIGCONT)
        job.set_mark("go on")
        assert job.results() == ["done"] * 3
    assert "no report of ranks [1]: add --allow-incomplete-ranks" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["bps_fr_rank_0", "bps_fr_rank_2"]
    partial = harness.run_command([*ANALYSIS, str(folder), "--allow-incomplete-ranks"])
    assert partial.returncode == 0, partial.stderr

# SPDX-License-Identifier: Apache-2.0
"""What dump() tells of a job that waits: which operation, for which server, and whose contribution is missing."""

import sys
from pathlib import Path
from typing import Any

import harness
import numpy as np

PARTITION = 16_384
NAME = 'layer "1"\\ \u00fc'  # has to be quoted in JSON


def late_rank(bps: Any, late: int, folder: str) -> list[dict[str, Any]]:
    """One rank pushes after both have seen what the job waits for; the dumps of that time and of the end."""
    array = np.ones(2 * PARTITION // 4, np.float32)
    seen = [Path(folder, str(rank)) for rank in range(bps.size())]
    is_late = bps.rank() == late
    handle = None if is_late else bps.push_pull_async_inplace(array, name=NAME)

    def waiting() -> dict[str, Any] | None:
        dump: dict[str, Any] = bps.dump()
        mine = len(dump["operations"]) == (0 if is_late else 2)
        mine &= all(one["waits_for"] == "answer" for one in dump["operations"])  # at first it waits for a credit
        return dump if mine and len(dump["rounds"]) == 1 else None

    during = harness.eventually(waiting)  # of the two partitions, each server has one
    seen[bps.rank()].touch()
    harness.eventually(lambda: all(path.exists() for path in seen))
    if handle is None:
        bps.push_pull_inplace(array, name=NAME)
    else:
        bps.synchronize(handle)
    bps.barrier()
    return [during, harness.eventually(lambda: None if (dump := bps.dump())["operations"] or dump["rounds"] else dump)]


def test_it_names_the_rank_that_everybody_waits_for(transport, tmp_path):
    env = harness.over(transport) | harness.cut_at(PARTITION)
    found = harness.run(late_rank, 1, str(tmp_path), workers=2, env=env)
    for during, after in found:
        assert all(loop["answered"] for loop in during["loops"] + after["loops"])
        (waiting,) = during["rounds"]
        assert (waiting["waits_for"], waiting["missing"], waiting["round"]) == ("pushes", [1], 0)
        assert 0 <= waiting["since_ms"] <= 60_000 * harness.PATIENCE
        (over,) = after["recent_rounds"]
        assert (over["state"], over["last_rank"], over["round"], over["tensor"]) == ("done", 1, 0, waiting["tensor"])
        assert 0 <= over["summed_ms"] <= over["ended_ms"] <= over["age_ms"]
        assert after["recent"][-1]["tensor"] == over["tensor"]
        assert not during["recent_rounds"]
    operations = found[0][0]["operations"]
    assert {one["operation"] for one in operations} == {f"push_pull of '{NAME}', round 0"}
    assert {one["waits_for"] for one in operations} == {"answer"}
    assert all(one["left_ms"] > 0 for one in operations)
    rounds = {(one["tensor"], one["partition"]) for dumps in found for one in dumps[0]["rounds"]}
    assert {(one["tensor"], one["partition"]) for one in operations} == rounds
    assert len({one["server"] for one in operations}) == 2


def test_without_a_job_nothing_is_written(tmp_path):
    command = [sys.executable, "-c", "from bps_rdma.cli import main; main()"]
    file = tmp_path / "job.json"
    done = harness.run_command([*command, "dump", "--job", "no-such-job", "-o", str(file)])
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "none of your processes on this machine takes part in a job whose name begins with no-such-job" in done.stderr
    )
    assert not file.exists()
    file.write_text("[]")  # as it was written once
    done = harness.run_command([*command, "why", str(file)])
    assert done.returncode == 2
    assert "there are no reports in" in done.stderr
    assert "write one while the job runs: bps dump -o FILE" in done.stderr

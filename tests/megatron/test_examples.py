"""The scripts of examples/megatron, started as their users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cluster
import pytest

import bps_rdma

EXAMPLES = Path(__file__).parents[2] / "examples" / "megatron"
TINY = ["--layers", "2", "--hidden", "32", "--heads", "4", "--words", "96", "--length", "16"]


def run(tmp_path: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(bps_rdma.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        command, cwd=tmp_path, env=cluster.clean_env(PYTHONPATH=path, **env), capture_output=True, text=True,
        timeout=200 * cluster.PATIENCE, check=False,
    )  # fmt: skip


def torchrun(tmp_path: Path, script: str, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(cluster.free_port()),
    ]
    return run(tmp_path, sys.executable, *launcher, str(EXAMPLES / script), *arguments)


def test_side_by_side(tmp_path):
    pytest.importorskip("matplotlib")
    done = torchrun(
        tmp_path, "compare.py", *TINY, "--overlap", "--distributed-optimizer", "--bucket", "20000", "--rounds", "3",
        "--steps", "2", "--json", "-", "--plot", "steps.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Apex" not in done.stderr
    found = json.loads(done.stdout)
    assert found["same"] == {"dpu-reduce": True}
    assert len(found["losses"]["stock"]) == 3 + 2 + 2 * (1 + 2)
    assert found["losses"]["stock"] == found["losses"]["dpu-reduce"]
    assert found["losses"]["stock"][-1] < found["losses"]["stock"][0]
    assert [one["kind"] for one in found["kinds"]] == ["stock", "dpu-reduce"]
    stock, ours = found["kinds"]
    assert stock["ratio"] == 1
    assert ours["ratio_lower"] <= ours["ratio"] <= ours["ratio_upper"]
    assert all(len(turns) == 3 and {len(turn) for turn in turns} == {2} for turns in found["seconds"].values())
    assert found["parameters"] > 10_000
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_what_cannot_be_compared_is_said(tmp_path):
    done = run(tmp_path, sys.executable, str(EXAMPLES / "compare.py"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: this is no rank of a job")
    assert "torchrun" in done.stderr
    done = torchrun(tmp_path, "compare.py", "--tp", "3")
    assert done.returncode != 0
    assert done.stderr.count("error: 2 ranks cannot be divided by --tp times --pp, which is 3") == 1
    done = torchrun(tmp_path, "compare.py", "--tp", "2", "--kinds", "stock")
    assert "start 4 ranks" in done.stderr

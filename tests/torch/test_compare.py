# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.torch.compare`, as people and machines read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cluster
import pytest

import bps_rdma

pytest.importorskip("matplotlib", reason="the plot extra is not installed")


def compare(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(bps_rdma.__file__).parent.parent)
    env = cluster.clean_env(PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "bps_rdma.torch.compare", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)


def test_everybody_is_compared(tmp_path):
    arguments = ["--model", "mlp", "--rounds", "2", "--steps", "2", "--buckets", "1,10"]
    done = compare(*arguments, "--json", "figures.json", "--plot", "figures.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reached the same weights" in " ".join(done.stdout.split())
    assert (tmp_path / "figures.png").stat().st_size > 10_000
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    kinds = [(one["kind"], one["bucket_mb"]) for one in figures["contenders"]]
    buckets = [(kind, mb) for kind in ("bucketed", "ddp-gloo", "ddp-bps") for mb in (1.0, 10.0)]
    assert kinds == [("naive", 0), ("flat", 0), ("overlap", 0), *buckets]
    assert figures["parameters"] == 3 * (512 * 512 + 512) + 512 * 16 + 16
    assert all(len(turn) == 2 for turns in figures["seconds"].values() for turn in turns)
    assert set(figures["transfer_ms"]) == {"bps", "gloo"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-9"], "gpt-25m"),
        (["--strategies", "best"], "naive"),
        (["--buckets", "1,x"], "1,10,100"),
        (["--plot", "nowhere/x.png"], "does not exist"),
    ],
)
def test_wrong_options(arguments, says, tmp_path):
    done = compare(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr

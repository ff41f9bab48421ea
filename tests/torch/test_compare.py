# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.tools.compare`, as people and machines read it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from rich.console import Console

import bps_rdma
from bps_rdma.tools.compare.baselines import ALONE, TrainingMethod
from bps_rdma.tools.compare.figures import figures_of
from bps_rdma.tools.compare.launch import Comparison, Times
from bps_rdma.tools.compare.report import print_report

pytest.importorskip("matplotlib", reason="the plot extra is not installed")


def compare(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(bps_rdma.__file__).parent.parent)
    env = harness.clean_env(PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "bps_rdma.tools.compare", *arguments]
    return harness.run_command(command, env=env, cwd=folder, within=280)


@pytest.mark.long  # measures
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


@pytest.mark.long  # trains
def test_a_sharded_optimizer_holds_less_and_profiles_show_the_wait(tmp_path):
    arguments = ["--model", "mlp", "--rounds", "1", "--steps", "1", "--buckets", "1", "--optimizer", "adamw"]
    arguments += ["--strategies", "bucketed,sharded", "--memory", "--profile", "profiles", "--json", "figures.json"]
    done = compare(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    whole, part = (one["memory_bytes"] for one in figures["contenders"])
    model = 4 * figures["parameters"]
    assert whole["model"] == whole["gradients"] == part["model"] == part["gradients"] == model
    assert 2 * model < whole["state"] < 2.01 * model
    assert model < part["state"] < 0.7 * whole["state"]  # two of three equal layers
    assert re.search(r"sharded 1 MB +3\.0 +3\.0 +4\.0", done.stdout), done.stdout
    files = {f"{way}.rank{rank}.json" for way in ("alone", "bucketed-1-MB", "sharded-1-MB") for rank in (0, 1)}
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == files
    events = json.loads((tmp_path / "profiles" / "bucketed-1-MB.rank0.json").read_text())["traceEvents"]
    assert [one["name"] for one in events].count("bps: wait for gradients") == 1


def times_of(alone: list[float], steps: list[float]) -> Times:
    methods = (TrainingMethod(ALONE), TrainingMethod("overlap"), TrainingMethod("sync-bps"))
    plan = Comparison("mlp", 1, 64, 2, len(alone), 1, 1, methods)
    rounds = zip(methods, (alone, steps, [0.001] * len(alone)), strict=True)
    return Times(plan, 1000, {method: [[one] for one in turns] for method, turns in rounds})


@pytest.mark.parametrize(
    ("alone", "steps", "noisy"),
    [
        ([0.10, 0.11, 0.12], [0.13, 0.14, 0.16], False),
        ([0.10, 0.50, 0.10], [0.10, 0.10, 0.12], True),
        ([0.50, 0.50, 0.50], [0.16, 0.16, 0.17], True),
    ],
)
def test_noise_that_is_larger_than_the_effect_is_called_so(alone, steps, noisy, capsys):
    times = times_of(alone, steps)
    (figure,) = figures_of(times)[2]
    assert figure.noisy == noisy
    print_report(times, Console(width=120))
    shown = capsys.readouterr().out
    assert ("noise" in shown) == noisy
    assert not re.search(r"-\d+%|\d{3,}%", shown), shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-9"], "gpt-25m"),
        (["--strategies", "best"], "naive"),
        (["--buckets", "1,x"], "1,10,100"),
        (["--buckets", "1,nan"], "1,10,100"),
        (["--plot", "nowhere/x.png"], "does not exist"),
        (["--device", "tpu"], "neither cpu nor cuda"),
        (["--optimizer", "adam"], "adamw"),
        (["--profile", "/proc/profiles"], "folder that you may write"),
        pytest.param(
            ["--device", "cuda"], "no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
        ),
    ],
)
def test_wrong_options(arguments, says, tmp_path):
    (done,) = harness.scripts("-m", "bps_rdma.tools.compare", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr

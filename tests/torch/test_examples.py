# SPDX-License-Identifier: Apache-2.0
"""The examples run as their README says, and learn."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import cluster
import pytest

pytestmark = pytest.mark.timeout(300)

TRAIN = str(Path(__file__).parents[2] / "examples" / "train.py")
STARTERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
    "bps run": [sys.executable, "-c", "from bps_rdma.cli import main; main()", "run", "-np", "2"],
}
SHORT = ["--epochs", "2", "--images", "2000"]


def start(starter: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = STARTERS[starter] + ([str(cluster.free_port())] if starter == "torchrun" else [])
    return subprocess.run(
        [*command, TRAIN, *options], capture_output=True, text=True, check=False, env=cluster.clean_env(), cwd="/",
        timeout=60 * cluster.PATIENCE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("starter", "options"),
    [
        ("alone", []),
        ("alone", ["--optimizer", "sharded"]),
        ("torchrun", []),
        ("torchrun", ["--strategy", "naive", "--optimizer", "sharded"]),
        ("bps run", ["--strategy", "flat"]),
        ("bps run", ["--strategy", "overlap", "--batch", "50"]),
    ],
)
def test_the_training_script_learns(starter, options):
    done = start(starter, *SHORT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"epoch \d: loss (\d+\.\d+), accuracy (\d+\.\d+)%", done.stdout)
    assert len(found) == 2, done.stdout
    assert float(found[1][0]) < float(found[0][0])
    assert float(found[1][1]) > 95
    assert ("trained on one rank" if starter == "alone" else "the same on all 2 ranks") in done.stdout


def losses(output: str) -> list[str]:
    return re.findall(r"epoch \d: loss \d+\.\d+", output)


def test_training_goes_on_from_its_checkpoint(tmp_path):
    file = ["--images", "500", "--checkpoint", str(tmp_path / "c.pt")]
    whole = start("bps run", "--images", "500", "--epochs", "3")
    first = start("bps run", *file, "--epochs", "2")
    rest = start("bps run", *file, "--epochs", "3")
    assert [run.returncode for run in (whole, first, rest)] == [0, 0, 0], whole.stderr + first.stderr + rest.stderr
    assert "going on after epoch 2" in rest.stdout
    assert losses(first.stdout) + losses(rest.stdout) == losses(whole.stdout)
    assert len(losses(whole.stdout)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_training_after_a_checkpoint(signum, status, tmp_path):
    command = [*STARTERS["bps run"], "--grace", "60", TRAIN, "--epochs", "1000", "--images", "500"]
    with subprocess.Popen(
        [*command, "--checkpoint", str(tmp_path / "c.pt")], stdout=subprocess.PIPE, text=True, env=cluster.clean_env(),
        cwd="/",
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert any("epoch 1:" in line for line in run.stdout)
        run.send_signal(signum)
        rest = run.stdout.read()
    assert re.search(rf"stopped after epoch \d+ by {signum.name}", rest), rest
    assert run.returncode == status


def test_an_option_that_does_not_exist():
    done = start("alone", "--strategy", "none")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr

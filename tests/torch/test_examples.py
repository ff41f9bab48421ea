# SPDX-License-Identifier: Apache-2.0
"""The examples run as their README says, and learn."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch

TRAIN = str(Path(__file__).parents[2] / "examples" / "train.py")
STARTERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
    "bps run": [sys.executable, "-c", "from bps_rdma.cli import main; main()", "run", "-np", "2"],
}
SHORT = ["--epochs", "2", "--images", "2000"]


def start(starter: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = STARTERS[starter] + ([str(harness.free_port())] if starter == "torchrun" else [])
    return harness.run_command([*command, TRAIN, *options])


def learned(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"epoch \d: loss (\d+\.\d+), accuracy (\d+\.\d+)%", done.stdout)
    assert len(found) == 2, done.stdout
    assert float(found[1][0]) < float(found[0][0])
    assert float(found[1][1]) > 95
    assert says in done.stdout


@pytest.mark.parametrize(
    ("starter", "options"),
    [
        pytest.param("alone", [], marks=pytest.mark.long),
        ("torchrun", []),
        pytest.param("bps run", ["--strategy", "flat"], marks=pytest.mark.long),
    ],
)
def test_the_training_script_learns(starter, options):
    alone = starter == "alone"
    learned(start(starter, *SHORT, *options), "trained on one rank" if alone else "the same on all 2 ranks")


def test_on_gpus_the_training_script_learns_or_says_that_there_is_none():
    done = start("bps run", *SHORT, "--device", "cuda")
    if torch.cuda.is_available():
        learned(done, "the same on all 2 ranks")
    else:
        assert done.returncode != 0
        assert "--device cuda: torch finds no GPU on this machine" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(0, ["--optimizer", "sharded"], marks=pytest.mark.long),
        (2, ["--strategy", "naive", "--optimizer", "sharded"]),
        pytest.param(2, ["--strategy", "overlap", "--batch", "50"], marks=pytest.mark.long),
    ],
)
def test_it_learns_with_other_options(ranks, options):
    done = harness.succeeded(harness.scripts(TRAIN, *SHORT, *options, ranks=ranks))
    learned(done, "the same on all 2 ranks" if ranks else "trained on one rank")


def losses(output: str) -> list[str]:
    return re.findall(r"epoch \d: loss \d+\.\d+", output)


def test_training_goes_on_from_its_checkpoint(tmp_path):
    def train(*options: str) -> subprocess.CompletedProcess[str]:
        return harness.succeeded(harness.scripts(TRAIN, "--images", "500", *options, ranks=2))

    file = ["--checkpoint", str(tmp_path / "c.pt")]
    whole, first, rest = train("--epochs", "3"), train(*file, "--epochs", "2"), train(*file, "--epochs", "3")
    assert "going on after epoch 2" in rest.stdout
    assert losses(first.stdout) + losses(rest.stdout) == losses(whole.stdout)
    assert len(losses(whole.stdout)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.long
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_training_after_a_checkpoint(signum, status, tmp_path):
    command = [*STARTERS["bps run"], "--grace", "60", TRAIN, "--epochs", "1000", "--images", "500"]
    with subprocess.Popen(
        [*command, "--checkpoint", str(tmp_path / "c.pt")], stdout=subprocess.PIPE, text=True, env=harness.clean_env(),
        cwd="/",
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert any("epoch 1:" in line for line in run.stdout)
        run.send_signal(signum)
        rest = run.stdout.read()
    assert re.search(rf"stopped after epoch \d+ by {signum.name}", rest), rest
    assert run.returncode == status


def test_an_option_that_does_not_exist():
    (done,) = harness.scripts(TRAIN, "--strategy", "none")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr

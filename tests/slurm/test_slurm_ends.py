# SPDX-License-Identifier: Apache-2.0
"""Ends that nobody planned: a rank is killed, a job is cancelled, requeued, or pushed aside by another one."""

import os
import re
import subprocess
import sys

import pytest
from slurm_lab import RANK, TRAIN, Slurm

EPOCHS = 12


@pytest.mark.parametrize("template", ["ranks", "nodes"])
def test_a_killed_rank_ends_the_job(slurm: Slurm, template: str) -> None:
    job = slurm.submit(template, RANK, "killed")
    assert job.await_end() == "FAILED", job.output
    assert job.output.count(" of 4: 6.0 ") == 4
    said = {"ranks": r"n2: task 3: Killed", "nodes": r"rank 3 \(pid \d+\) was killed by SIGKILL"}
    assert re.search(said[template], job.output), job.output


@pytest.mark.parametrize("template", ["ranks", "nodes", "servers"])
def test_a_cancelled_job_leaves_nothing(slurm: Slurm, template: str) -> None:
    job = slurm.submit(template, RANK, "forever")
    job.await_output(r"rank 1 of \d")
    subprocess.run(["scancel", str(job.number)], check=True)
    assert job.await_end() == "CANCELLED", job.output


def test_training_goes_on_where_it_was_interrupted(slurm: Slurm) -> None:
    """Once by a job of a partition that goes first, with a warning; once by an operator, without one."""
    file = slurm.home / "train.pt"
    options = ["--epochs", str(EPOCHS), "--images", "2000", "--checkpoint", str(file)]
    # One rank per node: this test starts them three times, and what takes time is that they import torch.
    job = slurm.submit("ranks", TRAIN, *options, options=("--ntasks-per-node=1",))
    job.await_output(r"epoch 2:")
    urgent = subprocess.Popen(["srun", "--partition=urgent", "--nodes=2", "--exclusive", "true"])
    job.await_output(r"stopped after epoch \d+ by SIGUSR1")
    job.await_output(r"going on after epoch")
    assert urgent.wait(timeout=60) == 0
    assert job.field("Restarts") == "1"
    subprocess.run(["scontrol", "requeue", str(job.number)], check=True)
    assert job.await_end() == "COMPLETED", job.output
    assert job.field("Restarts") == "2"
    assert job.output.count("going on after epoch") == 2
    done = [int(epoch) for epoch in re.findall(r"^epoch (\d+):", job.output, re.MULTILINE)]
    # Each epoch at least once, in order, and only what the operator's requeue interrupted a second time.
    assert sorted(set(done)) == list(range(1, EPOCHS + 1))
    assert done == sorted(done)
    assert len(done) <= EPOCHS + 1
    assert "the weights are the same on all 2 ranks" in job.output


def test_what_is_left_is_found(slurm: Slurm) -> None:
    """The fixture looks for what others must not leave; this is what it would see."""
    inside = ("nsenter", "--target", os.environ["BPS_TEST_SLURM_N2"], "--all")
    subprocess.run([*inside, "touch", "/dev/shm/segment"], check=True)
    code = "import socket; s = socket.create_server(('', 7777)); print('up', flush=True); s.accept()"
    command = [*inside, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as left:
        assert left.stdout is not None
        assert left.stdout.readline() == "up\n"
        found = " ".join(slurm.left())
        subprocess.run([*inside, "pkill", "-KILL", "-f", "create_server"], check=True)
    subprocess.run([*inside, "rm", "/dev/shm/segment"], check=True)
    assert "n2: process python" in found
    assert "n2: segment segment" in found
    assert ":7777" in found
    assert slurm.left() == []

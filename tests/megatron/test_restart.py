# SPDX-License-Identifier: Apache-2.0
"""A rank dies in the middle of a step: the others learn of it, and a new job goes on as if nothing had happened."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint
import cpu
import harness
import pytest
import torch.distributed as dist
from gpt import Setup, Trained, Training

from bps_rdma import megatron

STEPS = 6


def train(bps: Any, setup: Setup, folder: str, dies_in: int = -1) -> tuple[int, Trained] | str:
    """(step it began with, what came of it), or what became of it; rank 1 dies in a step's first collective."""
    from megatron.core.distributed import param_and_grad_buffer

    cpu.install()
    dist.init_process_group("gloo")
    training: Any = None
    start = param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync

    def die(self: Any, *arguments: Any, **options: Any) -> Any:
        if training.steps == dies_in and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        return start(self, *arguments, **options)

    param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync = die
    with megatron.enabled():
        training = Training(setup)
    begun = checkpoint.load(training, Path(folder))
    try:
        while training.steps < STEPS:
            training.step()
            checkpoint.save(training, Path(folder))
    except bps.BpsError as error:
        return type(error).__name__
    result = training.result()
    return begun, result


def in_another_order(bps: Any, setup: Setup, folder: str) -> str:
    """Loads a checkpoint into a training whose parameters are registered in another order."""
    cpu.install()
    dist.init_process_group("gloo")
    training = Training(replace(setup, in_order=False))
    training.step()
    checkpoint.save(training, Path(folder))
    try:
        checkpoint.load(Training(setup), Path(folder))
    except bps.InvalidArgumentError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_with_parameters_in_another_order_is_refused(tmp_path):
    setup = Setup(distributed_optimizer=True, overlap=True, overlap_gather=True)
    for said in harness.run(in_another_order, setup, str(tmp_path), workers=2, init=False):
        assert "was made with parameters in another order" in said
        assert "use in_order=False" in said


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(Setup(), id="plain", marks=pytest.mark.long),
        pytest.param(Setup(distributed_optimizer=True, overlap=True, overlap_gather=True), id="distributed optimizer"),
        pytest.param(Setup(bf16=True, overlap=True), id="bf16", marks=pytest.mark.long),
    ],
)
def test_a_new_job_goes_on_from_the_last_checkpoint(setup, tmp_path):
    undisturbed = harness.run(train, setup, str(tmp_path / "undisturbed"), workers=2, init=False)
    folder = str(tmp_path / "disturbed")
    env = {"BPS_SHUTDOWN_TIMEOUT": "1"}
    with harness.start(train, setup, folder, 3, workers=2, init=False, env=env) as job:
        assert job.outcomes()[0].value == "PeerLostError"
    resumed = harness.run(train, setup, folder, workers=2, init=False)
    for (zero, whole), (begun, rest) in zip(undisturbed, resumed, strict=True):
        assert (zero, begun) == (0, 3)
        assert rest.losses == whole.losses[3:]
        assert rest.norms == whole.norms[3:]
        assert rest.weights == whole.weights

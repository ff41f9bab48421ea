# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, hangs or disagrees: an exception on all others, through backward too, and never a hang."""

import os
import signal
import time
from typing import Any

import harness
import pytest
import torch
import training
from harness import await_mark, mark
from torch import nn

import bps_rdma
from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer

STRATEGIES = ["naive", "flat", "overlap", "bucketed"]
# Far more than a busy machine needs, and sooner than BPS_TIMEOUT or silence ends a wait.
SOON_S = 20 * harness.PATIENCE


def until_an_error(bps: Any, what: str, how: str) -> tuple[str, str, float]:
    """Trains until rank 1 dies or stops in its fourth backward; what the others see, and after how many seconds."""
    model: Any = training.seeded(training.Plain)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "optimizer":
        optimizer = DistributedOptimizer(optimizer, model.named_parameters())
    elif what == "cross barrier":
        optimizer = CrossBarrier(model, optimizer)
    else:
        model = DistributedDataParallel(model, strategy=what, bucket_mb=0.001)
    inner = getattr(model, "module", model)
    begin = time.monotonic()
    try:
        for step in range(6):
            if bps.rank() == 1 and step == 3:

                def leave(_: torch.Tensor) -> None:
                    if how == "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    await_mark("told", 0)

                inner.norm.weight.register_hook(leave)
            begin = time.monotonic()
            training.make_step(model, optimizer, training.batch(step))
    except bps_rdma.BpsError as error:
        seconds = time.monotonic() - begin
        mark("told")
        return type(error).__name__, str(error), seconds
    return "", "nothing happened", 0.0


@pytest.mark.parametrize("what", [*STRATEGIES, "optimizer", "cross barrier"])
def test_a_rank_that_dies_in_backward(what):
    env = {"BPS_SHUTDOWN_TIMEOUT": "1", "BPS_HEARTBEAT_TIMEOUT": "60"}
    with harness.start(until_an_error, what, "dies", workers=3, env=env) as job:
        outcomes = job.outcomes()
    assert outcomes[1].status == -signal.SIGKILL
    for rank in (0, 2):
        kind, text, seconds = outcomes[rank].value
        assert kind == "PeerLostError", text
        assert "worker 1" in text
        assert seconds < SOON_S


@pytest.mark.parametrize(
    "what", ["bucketed", *(pytest.param(what, marks=pytest.mark.long) for what in ("flat", "optimizer"))]
)
def test_a_rank_that_hangs_in_backward(what):
    env = {"BPS_SHUTDOWN_TIMEOUT": "1", "BPS_TIMEOUT": "6"}
    kind, text, seconds = harness.run(until_an_error, what, "hangs", workers=2, env=env)[0]
    assert kind == "DeadlineError", text
    assert "waits for rank 1" in text
    assert seconds < SOON_S


def disagreeing(bps: Any, what: str) -> tuple[str, str]:
    width = 4 if bps.rank() == 0 else 5
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, width))
    try:
        if what == "ddp":
            DistributedDataParallel(model)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = DistributedOptimizer(optimizer, model.named_parameters())
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    except bps_rdma.BpsError as error:
        return type(error).__name__, str(error)
    return "", "nothing happened"


@pytest.mark.parametrize("least", ["0", "1"])
@pytest.mark.parametrize("what", ["ddp", "optimizer"])
def test_ranks_that_disagree_about_shapes(what, least):
    env = {"BPS_TIMEOUT": str(5 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": "1", "BPS_MIN_WORKERS": least}
    found = harness.run(disagreeing, what, workers=2, env=env)
    assert all(kind for kind, _ in found), found
    assert any("1.weight" in text or "1.bias" in text for _, text in found), found

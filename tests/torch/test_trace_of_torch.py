# SPDX-License-Identifier: Apache-2.0
"""What the torch face adds to a trace: the parts of each step, gradients, buckets, and copies of a device."""

import time
from pathlib import Path
from typing import Any

import harness
import pytest
import simulated
import torch
from reference.trace_format import check

import bps_rdma.torch as bps_torch
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.tools.trace import files
from bps_rdma.tools.trace.steps import hidden_percent, steps_of
from bps_rdma.torch import transfer

STEPS = 5


class Slow(torch.autograd.Function):
    """Computes for some milliseconds in its backward, as a large layer does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return gradient


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.last(Slow.apply(self.first(value)))


def trains(bps: Any, strategy: str) -> None:
    torch.manual_seed(1)
    import bps_rdma.torch as bt

    model = bt.DistributedDataParallel(Model(), strategy=strategy, bucket_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()


def traces_of(folder: Path, strategy: str) -> list[files.Trace]:
    harness.run(trains, strategy, workers=2, env={"BPS_TRACE": str(folder)})
    found = files.find(folder)
    for trace in found:
        check(trace.path.read_text())
        assert trace.about["dropped"] == 0
    return found


def test_steps_gradients_and_buckets(tmp_path):
    for trace in traces_of(tmp_path, "bucketed"):
        by_step = [[span for span in trace.program if span.args["step"] == step] for step in range(STEPS)]
        for spans in by_step:
            names = [span.name for span in spans]
            assert names.count("forward") == names.count("backward") == names.count("wait for gradients") == 1
            assert {name for name in names if name.startswith("gradient ready: ")} == {
                f"gradient ready: {layer}.{part}" for layer in ("first", "last") for part in ("weight", "bias")
            }
            assert len([name for name in names if name.startswith("launch ddp")]) >= 2
            forward, backward, wait = (
                next(span for span in spans if span.name == name)
                for name in ("forward", "backward", "wait for gradients")
            )
            assert forward.end <= backward.begin <= backward.end <= wait.begin
            assert backward.end - backward.begin >= 49_000  # microseconds; it slept
            ready = {span.name: span for span in spans}
            late, early = ready["gradient ready: first.weight"], ready["gradient ready: last.weight"]
            assert late.begin - early.begin >= 49_000


@pytest.mark.long  # measures shares
def test_what_is_sent_during_backward_is_hidden(tmp_path):
    """Waits of the last bucket are exposed; with all of them after backward, all communication is."""
    overlapped = traces_of(tmp_path / "bucketed", "bucketed")
    flat = traces_of(tmp_path / "flat", "flat")
    at_once, after = hidden_percent(overlapped), hidden_percent(flat)
    assert at_once is not None
    assert after is not None
    assert after < 30
    assert at_once > after
    for row in steps_of(flat)[1:]:
        assert row["took_ms"] >= row["forward_ms"] + row["backward_ms"] + row["wait_ms"] - 1e-6
        assert 0 < row["under_way_ms"] <= row["took_ms"]


def steps_with_an_optimizer(bps: Any) -> None:
    model = Model()
    optimizer = bps_torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()


def test_the_step_of_an_optimizer(tmp_path):
    harness.run(steps_with_an_optimizer, workers=2, env={"BPS_TRACE": str(tmp_path)})
    for trace in files.find(tmp_path):
        steps = {name: [span.args["step"] for span in trace.program if span.name == name]
                 for name in ("optimizer", "wait for gradients")}  # fmt: skip
        assert steps == {"optimizer": list(range(STEPS)), "wait for gradients": list(range(STEPS))}
        assert all(row["optimizer_ms"] > 0 for row in steps_of([trace]))


def stages_from_a_device(bps: Any) -> None:
    simulated.install(0.002, immediate=True)
    tensor = torch.ones(3 * 2048 + 1)
    transfer.all_reduce(tensor, OperationOptions(ReduceOp.sum, "staged")).wait()
    assert float(tensor[0]) == 2


def test_copies_from_and_to_a_device(tmp_path):
    env = {"BPS_TRACE": str(tmp_path), "BPS_GPU_CHUNK_BYTES": "8192", "BPS_GPU_CHUNKS": "3"}
    harness.run(stages_from_a_device, workers=2, env=env)
    for trace in files.find(tmp_path):
        copies = {span.name: span for span in trace.program}
        assert set(copies) == {f"copy to {where}: staged [{i}]" for where in ("host", "device") for i in range(4)}
        for i in range(4):
            down, up = copies[f"copy to host: staged [{i}]"], copies[f"copy to device: staged [{i}]"]
            assert down.end <= up.begin
            assert min(down.end - down.begin, up.end - up.begin) >= 2000  # microseconds that the device takes


def rounds_are_chosen(bps: Any) -> None:
    trains(bps, "bucketed")


def test_only_the_steps_that_are_asked_for(tmp_path):
    env = {"BPS_TRACE": str(tmp_path), "BPS_TRACE_START_STEP": "2", "BPS_TRACE_END_STEP": "3"}
    harness.run(rounds_are_chosen, workers=2, env=env)
    for trace in files.find(tmp_path):
        assert {span.args["step"] for span in trace.program} == {2, 3}

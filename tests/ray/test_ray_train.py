# SPDX-License-Identifier: Apache-2.0
"""Ray Train on the backend bps: an unmodified loop, which goes on after a worker was killed."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pyarrow", reason="Ray Train is not installed: pip install 'bps_rdma[ray-train]'")


def loop(config: dict[str, Any]) -> None:
    """Torch's own DistributedDataParallel; nothing here knows of bps_rdma."""
    import ray.train
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, first = dist.get_rank(), 0
    if found := ray.train.get_checkpoint():
        with found.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
            model.module.load_state_dict(state["model"])
            first = state["step"]
    for step in range(first, 4):
        torch.manual_seed(step * 100 + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        mark = Path(config["mark"])
        if step == 2 and rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
        metrics = {"weights": weights, "backend": dist.get_backend(), "begun": first}
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.module.state_dict(), "step": step + 1}, Path(folder) / "state.pt")
            saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report(metrics, checkpoint=saved)


def in_one_process() -> float:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(step * 100 + rank)
            (model(torch.randn(16, 8)).square().mean() / 2).backward()
        optimizer.step()
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


@pytest.mark.long  # Ray Train takes half a minute to start again
def test_a_loop_goes_on_after_a_worker_was_killed(two_nodes, tmp_path):
    import ray.train
    from ray.train.torch import TorchTrainer

    from bps_rdma.ray.train import BpsConfig

    result = TorchTrainer(
        loop, train_loop_config={"mark": str(tmp_path / "mark")}, torch_config=BpsConfig(timeout_s=120),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path), name="run", failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()  # fmt: skip
    assert result.metrics["backend"] == "bps"
    assert (tmp_path / "mark").exists()
    assert result.metrics["begun"] > 0
    assert result.metrics["weights"] == pytest.approx(in_one_process(), abs=1e-5)

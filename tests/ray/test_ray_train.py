# SPDX-License-Identifier: Apache-2.0
"""Ray Train on the backend bps: an unmodified loop, which goes on after a worker was killed."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import pytest
import torch

pytest.importorskip("pyarrow", reason="Ray Train is not installed: pip install 'ray[train]>=2.60'")


def loop(config: dict[str, Any]) -> None:
    """Torch's own DistributedDataParallel; nothing here knows of bps_rdma."""
    import ray.train
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, first, losses = dist.get_rank(), 0, []
    mark = Path(config["mark"])
    if config["end"] == "hang" and dist.get_world_size() == 1 and not mark.exists():
        raise RuntimeError("one node was late, and there is nothing to lose: once more")
    if found := ray.train.get_checkpoint():
        with found.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
            model.module.load_state_dict(state["model"])
            first = state["step"]
    for step in range(first, 4):
        torch.manual_seed(step * 100 + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 2 and rank == 1 and not mark.exists():
            mark.write_text(ray.get_runtime_context().get_node_id())
            if config["end"] == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
        metrics = {"weights": weights, "backend": dist.get_backend(), "begun": first, "ranks": dist.get_world_size()}
        metrics["losses"] = losses
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


@pytest.mark.long
@pytest.mark.timeout(900)  # two jobs of Ray Train, each of which takes minutes to start on a busy machine
def test_losses_and_weights_are_those_of_gloo(two_nodes, tmp_path):
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    from bps_rdma.ray.train import BpsConfig

    found = {}
    for name, config in (("gloo", TorchConfig(backend="gloo", timeout_s=120)), ("bps", BpsConfig(timeout_s=120))):
        mark = tmp_path / f"{name} mark"
        mark.touch()  # nobody is killed
        result = TorchTrainer(
            loop, train_loop_config={"mark": str(mark), "end": "none"}, torch_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=str(tmp_path), name=name),
        ).fit()  # fmt: skip
        assert (result.metrics["backend"], result.metrics["ranks"]) == (name, 2)
        assert (result.metrics["begun"], len(result.metrics["losses"])) == (0, 4)
        found[name] = result.metrics["losses"], result.metrics["weights"]
    assert found["bps"] == found["gloo"]


@pytest.mark.long  # Ray Train takes half a minute to start again
def test_a_loop_goes_on_after_a_worker_was_killed(two_nodes, tmp_path):
    import ray.train
    from ray.train.torch import TorchTrainer

    from bps_rdma.ray.train import BpsConfig

    result = TorchTrainer(
        loop, train_loop_config={"mark": str(tmp_path / "mark"), "end": "kill"}, torch_config=BpsConfig(timeout_s=120),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path), name="run", failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()  # fmt: skip
    assert result.metrics["backend"] == "bps"
    assert (tmp_path / "mark").exists()
    assert result.metrics["begun"] > 0
    assert result.metrics["weights"] == pytest.approx(in_one_process(), abs=1e-5)


@pytest.mark.long
def test_a_loop_goes_on_with_fewer_workers_when_a_node_is_lost(two_nodes, tmp_path, monkeypatch):
    import ray.train
    from ray.train.torch import TorchTrainer

    from bps_rdma.ray.train import BpsConfig

    # How long Ray Train tries to get as many workers as before.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(20 * harness.PATIENCE))
    stays, goes = (
        two_nodes.add_node(num_cpus=1, resources={"elastic": 1}, object_store_memory=80_000_000) for _ in range(2)
    )
    two_nodes.wait_for_nodes()
    mark = tmp_path / "mark"
    removed = threading.Thread(target=remove_when_marked, args=(two_nodes, [stays, goes], mark), daemon=True)
    removed.start()
    result = TorchTrainer(
        loop, train_loop_config={"mark": str(mark), "end": "hang"}, torch_config=BpsConfig(timeout_s=120),
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1, "elastic": 1}),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path), name="run", failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()  # fmt: skip
    removed.join(60)
    assert not removed.is_alive(), "no worker has set the mark"
    two_nodes.remove_node(stays if stays in two_nodes.worker_nodes else goes)
    assert (result.metrics["ranks"], result.metrics["backend"]) == (1, "bps")
    assert result.metrics["begun"] > 0


def remove_when_marked(cluster: Any, nodes: list[Any], mark: Path) -> None:
    """Ends the node whose worker has set the mark."""
    wanted = harness.eventually(lambda: mark.exists() and mark.read_text(), 120)  # it is there before its text
    cluster.remove_node(next(node for node in nodes if node.node_id == wanted), allow_graceful=False)

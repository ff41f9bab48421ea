# SPDX-License-Identifier: Apache-2.0
"""examples/frameworks train on gloo and on bps with the same losses and weights, bit for bit, on two ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import harness
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
COMPILES = 600  # DeepSpeed's extension, when it is first used
pytestmark = pytest.mark.timeout(2 * COMPILES)


def train(*words: str) -> dict[str, str]:
    """What the script printed on rank 0, by its first word."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
               str(harness.free_port()), *words]  # fmt: skip
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "PATH") if name in os.environ}
    env = harness.clean_env(**kept, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu")
    began = time.monotonic()
    done = harness.run_command(command, env=env, within=COMPILES)
    lines = [line.split(": ", 1) for line in done.stdout.splitlines() if re.match("(losses|weights|backend): ", line)]
    print(f"{words}: {time.monotonic() - began:.1f} s")
    said = dict(lines)
    # A rank on gloo aborts now and then when the other one has ended first; what it has computed counts.
    assert done.returncode == 0 or said.get("backend") == "gloo", done.stdout + done.stderr
    return said


def same(said: dict[str, str], expected: dict[str, str]) -> None:
    assert said.pop("backend") == "bps"
    assert expected.pop("backend") == "gloo"
    assert said == expected
    losses = [float(word) for word in said["losses"].split()]
    assert len(losses) == 8


@pytest.mark.parametrize("script", ["trainer.py", "accelerated.py"])
def test_those_that_insist_on_gloo(script):
    script = str(FOLDER / script)
    same(train("-m", "bps_rdma.torch.run", script), train(script))


@pytest.mark.parametrize("script", ["lightning_module.py", "fabric.py"])
def test_those_that_are_told_a_backend(script):
    script = str(FOLDER / script)
    same(train(script), train(script, "gloo"))


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed(stage):
    script = str(FOLDER / "zero.py")
    same(train(script, stage), train(script, stage, "gloo"))


IGNITE = """
import ignite.distributed as idist
from torch import nn
model = idist.auto_model(nn.Linear(2, 2))
if idist.get_rank() == 0:
    print("losses:", type(model).__name__, idist.get_world_size())
"""


def test_ignite_wraps_no_model_on_a_backend_that_it_does_not_know(tmp_path):
    """docs/frameworks.md warns of it: if this fails, take the warning away."""
    script = tmp_path / "script.py"
    script.write_text(IGNITE)
    assert train("-m", "bps_rdma.torch.run", str(script))["losses"] == "Linear 2"


TORCHTITAN = """
import sys
import torch
import torch.distributed as dist
from torchtitan.config import CommConfig
from torch.distributed.fsdp import fully_shard
from torchtitan.distributed import utils
if len(sys.argv) > 1:
    dist.Backend.default_device_backend_map[utils.device_type] = sys.argv[1]
utils.init_distributed(CommConfig(init_timeout_seconds=100))
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
model = fully_shard(torch.nn.Linear(8, 2), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(2 + dist.get_rank())
losses = []
for _ in range(8):
    loss = model(torch.randn(8, 8, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(utils.dist_mean(loss.detach(), mesh))
weights = sum(one.full_tensor().detach().double().sum().item() for one in model.parameters())
if dist.get_rank() == 0:
    print("losses:", *losses)
    print("weights:", weights.hex())
    print("backend:", dist.get_backend())
dist.destroy_process_group()
"""


def test_how_torchtitan_names_a_backend(tmp_path):
    """Its own start, clipping and means. It trains on GPUs only, so the model is none of its own."""
    script = tmp_path / "script.py"
    script.write_text(TORCHTITAN)
    expected = train(str(script), "gloo")
    named = "import bps_rdma.torch\n" + TORCHTITAN
    script.write_text(named)
    same(train(str(script), "bps"), dict(expected))
    same(train("-m", "bps_rdma.torch.run", str(script)), expected)


def test_the_page_names_the_versions_that_were_tried():
    page = (FOLDER.parents[1] / "docs" / "frameworks.md").read_text()
    for name in ("transformers", "accelerate", "lightning", "deepspeed", "pytorch-ignite", "torchtitan"):
        assert f"{name} {version(name)}" in page

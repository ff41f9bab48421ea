# SPDX-License-Identifier: Apache-2.0
"""examples/frameworks train on gloo and on bps with the same losses and weights, bit for bit, on two ranks."""

import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import harness
import pytest

from bps_rdma.errors import InvalidArgumentError

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
COMPILES = 600  # DeepSpeed's extension, when it is first used
pytestmark = pytest.mark.timeout(2 * COMPILES)


def train(*words: str, starts_itself: bool = False) -> dict[str, str]:
    """What the script printed on rank 0, by its first word. torchrun starts two ranks, unless the script does so."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(harness.free_port())]
    command = [sys.executable, *([] if starts_itself else torchrun), *words]
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "PATH") if name in os.environ}
    env = harness.clean_env(**kept, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu",
                            BPS_MIN_COMPRESS_BYTES="0")  # fmt: skip
    began = time.monotonic()
    done = harness.run_command(command, env=env, within=COMPILES)
    words_of_ours = re.compile("(losses|weights|backend|hooks|differ): ")
    lines = [line.split(": ", 1) for line in done.stdout.splitlines() if words_of_ours.match(line)]
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
def test_those_with_a_strategy_of_ours_and_those_that_are_told_a_backend(script):
    script = str(FOLDER / script)
    expected = train(script, "gloo")
    same(train(script), dict(expected))
    same(train(script, "bps"), expected)


LIGHTNING = """
import sys
import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
import bps_rdma.torch.lightning
from bps_rdma.torch import Int8
from bps_rdma.torch.lightning import BpsStrategy

class Module(lightning.LightningModule):
    def __init__(self, is_manual):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(16, 8, sparse=is_manual), torch.nn.Linear(8, 8))
        self.automatic_optimization = not is_manual
        self.losses = []

    def training_step(self, batch):
        loss = self.layers(batch[0]).square().mean()
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_train_end(self):
        self.hook = self.trainer.strategy.model._get_ddp_logging_data().get("comm_hook", "none")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

def trained(strategy, is_manual, accumulated):
    lightning.seed_everything(1)
    model = Module(is_manual)
    data = torch.utils.data.TensorDataset(torch.randint(0, 16, (128,)))
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulated)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    return model

def strategy():
    return {"bps": "bps", "gloo": DDPStrategy(process_group_backend="gloo")}.get(sys.argv[1]) or BpsStrategy()

if sys.argv[1] == "group":
    dist.init_process_group("gloo")
plain, accumulated, manual = trained(strategy(), False, 1), trained(strategy(), False, 2), trained(strategy(), True, 1)
short = trained(BpsStrategy(compression=Int8(everywhere=True)), False, 1) if sys.argv[1] == "bps" else plain
if dist.get_rank() == 0:
    print("losses:", *plain.losses)
    print("weights:", *(one.detach().tolist() for model in (accumulated, manual) for one in model.parameters()))
    print("backend:", dist.get_backend())
    print("hooks:", plain.hook, accumulated.hook, manual.hook)
    print("differ:", short.losses != plain.losses)
"""


def test_lightning_with_our_hook(tmp_path):
    """By name, started by Lightning itself; and in a group of another backend that was there before."""
    script = tmp_path / "script.py"
    script.write_text(LIGHTNING)
    expected = train(str(script), "gloo")
    assert (expected.pop("hooks"), expected.pop("differ")) == ("none none none", "False")
    for started, backend in (("bps", "bps"), ("group", "gloo")):
        said = train(str(script), started, starts_itself=started == "bps")
        assert said.pop("hooks") == " ".join(3 * ["ddp_comm_hook"])
        assert said.pop("differ") == str(started == "bps")
        assert said == expected | {"backend": backend}


@harness.on_ranks(workers=2, init=False)
def test_a_model_keeps_its_names_from_fit_to_fit(bps):
    import torch
    import torch.distributed as dist

    import bps_rdma.torch
    from bps_rdma.torch.lightning import BpsFabricStrategy

    dist.init_process_group("gloo")
    bps_rdma.torch.init()
    strategy, models = BpsFabricStrategy(), [torch.nn.Linear(2, 2) for _ in range(2)]
    states = [strategy._state_of(model) for model in (*models, *models)]
    assert states[:2] == states[2:]
    assert states[0] is not states[1]
    dist.barrier()
    bps_rdma.torch.shutdown()
    dist.destroy_process_group()


def test_lightning_with_another_hook_is_refused():
    from bps_rdma.torch.lightning import BpsStrategy

    with pytest.raises(InvalidArgumentError, match="ddp_comm_state is for another"):
        BpsStrategy(ddp_comm_state=1)


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


KINDS = ["trainer", "accelerate", "fabric", "zero-1", "zero-2", "zero-3"]


def test_the_benchmark_compares_frameworks_in_the_same_processes():
    """It ends with an error if a loss differs."""
    program = FOLDER.parents[1] / "bench" / "parallel_training.py"
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "PATH") if name in os.environ}
    env = harness.clean_env(**kept, HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu")
    words = "--rounds", "2", "--steps", "2", "--width", "32", "--kinds", *KINDS
    done = harness.run_command([sys.executable, str(program), *words], env=env, within=COMPILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^ *(\S+): bps .* times as fast", done.stdout, re.MULTILINE) == KINDS


TRIED = "torch", "transformers", "accelerate", "lightning", "deepspeed", "pytorch-ignite", "ray", "torchtitan"


def test_the_page_names_the_versions_that_were_tried():
    page = (FOLDER.parents[1] / "docs" / "frameworks.md").read_text()
    for name in TRIED:
        assert f"| {name} {version(name).partition('+')[0]} |" in page  # torch's has "+cpu"

# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ray: the same bits on Ray and without it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

import bps_rdma

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
TINY = ["--layers", "4", "--hidden", "32", "--heads", "4", "--words", "96", "--length", "16"]
SHAPES = {
    "pp2-cp2": (4, ["--pp", "2", "--cp", "2"]),
    "tp2-pp2": (4, ["--tp", "2", "--pp", "2"]),
    "cp2-dp2": (4, ["--cp", "2"]),
    "tp2-pp2-dp2": (8, ["--tp", "2", "--pp", "2", "--overlap", "--distributed-optimizer"]),
    "tp2-pp2-cp2": (8, ["--tp", "2", "--pp", "2", "--cp", "2"]),
}


def start(folder: Path, command: list[str], script: Path, *options: str, **env: str) -> dict[str, Any]:
    """Runs a script in either mode; what it wrote."""
    done = subprocess.run(
        [sys.executable, *command, str(script), *TINY, *options, "--json", str(folder / "outcome.json")],
        cwd=folder, env=harness.clean_env(**env) | {"PYTHONPATH": paths()}, capture_output=True, text=True,
        timeout=200 * harness.PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads((folder / "outcome.json").read_text())
    outcome.pop("seconds", None)
    return outcome


def paths() -> str:
    return os.pathsep.join([str(Path(bps_rdma.__file__).parent.parent), os.environ["PYTHONPATH"]])


def locally(folder: Path, ranks: int, script: str, *options: str, by: str = "torchrun") -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port"]
    launcher = (
        ["-m", "bps_rdma", "run", "-np", str(ranks)] if by == "bps run" else [*launcher, str(harness.free_port())]
    )
    return start(folder, launcher, EXAMPLES / script, *options)


def on_ray(two_nodes, folder: Path, ranks: int, script: Path, *options: str) -> dict[str, Any]:
    where = ["--mode", "ray", "--hosts", "2", "--per-host", str(ranks // 2), "--cpus", "0.5"]
    return start(folder, [], script, *where, *options, RAY_ADDRESS=two_nodes.address)


@pytest.mark.parametrize(
    ("shape", "by"),
    [
        ("pp2-cp2", "bps run"),  # test_a_training_goes_on_in_either_mode has torchrun
        *(pytest.param(name, "torchrun", marks=pytest.mark.long) for name in SHAPES),
    ],
)
def test_one_script_in_both_modes(two_nodes, tmp_path, shape, by):
    ranks, options = SHAPES[shape]
    wanted = locally(tmp_path, ranks, "train.py", *options, "--steps", "4", by=by)
    found = on_ray(two_nodes, tmp_path, ranks, EXAMPLES / "train.py", *options, "--steps", "4")
    assert found == wanted
    assert len(set(wanted["losses"])) == 4


def test_a_training_goes_on_in_either_mode(two_nodes, tmp_path):
    """On Ray it loses a rank and goes on by itself; what it saved last, torchrun goes on from."""
    options = ["--tp", "2", "--steps"]
    undisturbed = locally(tmp_path, 2, "train.py", *options, "6")
    dies = tmp_path / "dies.py"
    dies.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import train, training\n"
        "def dies(options):\n"
        "    step = training.Training.step\n"
        "    def wrapped(self):\n"
        "        if self.steps == 2 and os.environ['TORCHELASTIC_RESTART_COUNT'] + os.environ['RANK'] == '01':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        step(self)\n"
        "    training.Training.step = wrapped\n"
        "    return sound(options)\n"
        "if __name__ == '__main__':\n"
        "    sound, training.train = training.train, dies\n"
        "    train.main()\n"
    )
    saved = ["--checkpoints", str(tmp_path / "saved")]
    on = on_ray(two_nodes, tmp_path, 2, dies, *options, "4", "--max-failures", "1", *saved)
    assert on["first"] == 2
    assert on["losses"] == undisturbed["losses"][2:4]
    again = locally(tmp_path, 2, "train.py", *options, "6", *saved)
    assert again["first"] == 4
    assert again["losses"] == undisturbed["losses"][4:]
    assert again["weights"] == undisturbed["weights"]


@pytest.mark.long
@pytest.mark.parametrize("by", ["torchrun", "bps run"])
def test_ray_goes_on_from_a_checkpoint_of_one_machine(two_nodes, tmp_path, by):
    options, saved = ["--tp", "2", "--steps"], ["--checkpoints", str(tmp_path / "saved")]
    undisturbed = locally(tmp_path, 2, "train.py", *options, "4", by=by)
    begun = locally(tmp_path, 2, "train.py", *options, "2", *saved, by=by)
    on = on_ray(two_nodes, tmp_path, 2, EXAMPLES / "train.py", *options, "4", *saved)
    assert (begun["first"], on["first"]) == (0, 2)
    assert begun["losses"] + on["losses"] == undisturbed["losses"]
    assert on["weights"] == undisturbed["weights"]


def test_adapters_train_on_ray(two_nodes, tmp_path):
    found = on_ray(two_nodes, tmp_path, 2, EXAMPLES / "lora.py", "--pp", "2", "--recompute", "--steps", "2")
    assert found["trained"] == [8, 8]
    assert len(set(found["losses"])) == 2


@pytest.mark.long
@pytest.mark.timeout(900)  # 20 processes import torch and Megatron
def test_adapters_train_in_both_modes(two_nodes, tmp_path):
    """One goes on from the adapters of the other, whose parallelism is another one."""
    options = ["--recompute", "--steps", "3", "--adapters"]
    shape = ["--tp", "2", "--pp", "2", "--sequence-parallel"]
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    found = on_ray(two_nodes, tmp_path, 8, EXAMPLES / "lora.py", *shape, *options, str(ours))
    wanted = locally(tmp_path, 8, "lora.py", *shape, *options, str(theirs))
    assert found == wanted
    assert (found["loaded"], found["trained"]) == (False, [8] * 8)
    again = locally(tmp_path, 4, "lora.py", "--tp", "2", *options, str(ours))
    assert (again["loaded"], again["trained"]) == (True, [16] * 4)


@pytest.mark.long
def test_the_driver_of_the_rayjob(two_nodes, tmp_path):
    """The entrypoint of the manifest, as the operator starts it beside the head of its cluster."""
    text = (EXAMPLES.parent / "kubernetes" / "rayjob.yaml").read_text()
    (line,) = re.findall(r"^  entrypoint: (.*)$", text, re.MULTILINE)
    python, script, *options = line.split()
    assert (python, script) == ("python", "/workspace/ray/train.py")
    assert (EXAMPLES / "train.py").exists()  # where the Dockerfile of docs/kubernetes.md copies examples to
    shorter = {"4": "1", "100": "2"}
    options = [shorter.get(option, option) for option in options]
    found = start(tmp_path, [], EXAMPLES / "train.py", *options, "--cpus", "0.5", RAY_ADDRESS=two_nodes.address)
    assert len(found["losses"]) == 2

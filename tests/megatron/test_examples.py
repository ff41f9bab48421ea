# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/megatron, started as their users start them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest

import bps_rdma

EXAMPLES = Path(__file__).parents[2] / "examples" / "megatron"
COMPARE, PRETRAIN = str(EXAMPLES / "compare.py"), str(EXAMPLES / "pretrain.py")
TINY = ["--layers", "2", "--hidden", "32", "--heads", "4", "--words", "96", "--length", "16"]


def run(tmp_path: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(bps_rdma.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return harness.run_command(command, env=harness.clean_env(PYTHONPATH=path, **env), cwd=tmp_path, within=200)


def torchrun(tmp_path: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(harness.free_port()),
    ]
    return run(tmp_path, sys.executable, *launcher, *arguments)


def test_side_by_side(tmp_path):
    plot = ["--plot", "steps.png"] if importlib.util.find_spec("matplotlib") else []
    done = harness.succeeded(harness.scripts(
        COMPARE, *TINY, "--overlap", "--distributed-optimizer", "--bucket", "20000", "--rounds", "3", "--steps", "2",
        "--json", "-", *plot, folder=tmp_path, ranks=2,
    ))  # fmt: skip
    assert "Apex" not in done.stderr
    found = json.loads(done.stdout)
    assert found["same"] == {"dpu-reduce": True}
    assert len(found["losses"]["stock"]) == 3 + 2 + 2 * (1 + 2)
    assert found["losses"]["stock"] == found["losses"]["dpu-reduce"]
    assert found["losses"]["stock"][-1] < found["losses"]["stock"][0]
    assert [one["kind"] for one in found["kinds"]] == ["stock", "dpu-reduce"]
    stock, ours = found["kinds"]
    assert stock["ratio"] == 1
    assert ours["ratio_lower"] <= ours["ratio"] <= ours["ratio_upper"]
    assert all(len(turns) == 3 and {len(turn) for turn in turns} == {2} for turns in found["seconds"].values())
    assert found["parameters"] > 10_000
    assert not plot or (tmp_path / "steps.png").stat().st_size > 1000


def test_steps_of_the_overlap_side_by_side(tmp_path):
    steps = ["steps-none", "steps-a", "steps-ab", "steps-abc"]
    done = harness.succeeded(harness.scripts(
        COMPARE, *TINY, "--distributed-optimizer", "--bucket", "1000", "--rounds", "1", "--steps", "1", "--json", "-",
        "--kinds", ",".join(["stock", *steps]), folder=tmp_path, ranks=2,
    ))  # fmt: skip
    figures = json.loads(done.stdout)
    assert [one["kind"] for one in figures["kinds"]] == ["stock", *steps]
    # Buckets in another order make norms of other bits.
    for kind in steps:
        assert figures["losses"][kind] == pytest.approx(figures["losses"]["stock"], rel=1e-5)
    assert "forward uses" in done.stderr, "steps-ab gathers in the order of use"
    done, _ = harness.scripts(COMPARE, "--kinds", "stock,steps-a", folder=tmp_path, ranks=2)
    assert "hint: add --distributed-optimizer" in done.stderr


@pytest.mark.long
def test_what_cannot_be_compared_is_said_once_by_torchrun(tmp_path):
    done = torchrun(tmp_path, COMPARE, "--tp", "3")
    assert done.returncode != 0
    assert done.stderr.count("error: 2 ranks cannot be divided by --tp times --pp, which is 3") == 1


def test_what_cannot_be_compared_is_said(tmp_path):
    done, other = harness.scripts(COMPARE, "--tp", "3", folder=tmp_path, ranks=2)
    assert done.returncode == other.returncode == 1
    assert done.stderr.count("error: 2 ranks cannot be divided by --tp times --pp, which is 3") == 1
    assert "error:" not in other.stderr  # torch may say that the store of the first rank is gone
    (done,) = harness.scripts(COMPARE, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this process is not a rank of a job")
    assert "torchrun" in done.stderr
    done, other = harness.scripts(COMPARE, "--tp", "2", "--kinds", "stock", folder=tmp_path, ranks=2)
    assert "start 4 ranks" in done.stderr
    assert "error:" not in other.stderr
    done, other = harness.scripts(COMPARE, "--plot", "steps.txt", folder=tmp_path, ranks=2)
    assert done.returncode == other.returncode == 1
    assert "hint: end its name with one of .png" in done.stderr


def test_pretraining_is_that_of_stock_megatron(tmp_path):
    stock = harness.succeeded(harness.scripts(PRETRAIN, *TINY, "--steps", "4", folder=tmp_path, ranks=2))
    options = ["--steps", "4", "--use-dpu-reduce", "--overlap", "--distributed-optimizer"]
    ours = harness.succeeded(harness.scripts(PRETRAIN, *TINY, *options, folder=tmp_path, ranks=2))
    assert len(losses(stock.stdout)) == 4
    assert losses(ours.stdout) == pytest.approx(losses(stock.stdout), abs=2e-5)
    assert "\n0 buckets over bps_rdma" in stock.stdout
    assert "buckets over bps_rdma" in ours.stdout
    assert "\n0 buckets over bps_rdma" not in ours.stdout


def losses(text: str) -> list[float]:
    """Of each step that a script has printed."""
    return [float(line.split()[3].rstrip(",")) for line in text.splitlines() if line.startswith("step ")]


def cluster_env(**env: str) -> dict[str, str]:
    """Two "hosts" with two ranks each and two servers, all of them here."""
    binaries = str(Path(harness.binary("bps-server")).parent)
    port = harness.free_ports(2)
    return {
        "HEAD": "127.0.0.1", "SCHEDULER": "127.0.0.1", "HOSTS": "2", "SERVERS": "2", "PER_HOST": "2",
        "PORT": str(port), "SCHEDULER_PORT": str(port + 1), "PYTHON": sys.executable,
        "BPS_SECRET": "the secret of this test", "PATH": os.pathsep.join([binaries, os.environ["PATH"]]),
        "BPS_JOIN_TIMEOUT": "180",  # four ranks import Megatron at once
    } | env  # fmt: skip


def members(tmp_path: Path, *commands: list[str], **env: str) -> list[str]:
    """Starts a member per command, waits for all of them; what each of them wrote."""
    path = os.pathsep.join(filter(None, [str(Path(bps_rdma.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]))
    everywhere = harness.clean_env(PYTHONPATH=path, **cluster_env(**env))
    with harness.Members() as running:
        for number, command in enumerate(commands):
            running.command(f"member {number}", [str(EXAMPLES / "cluster.sh"), *command], everywhere, cwd=tmp_path)
        running.succeed(200)
        return [running.log(member) for member in running.processes]


@pytest.mark.long
def test_a_cluster_with_dedicated_servers(tmp_path):
    script = [PRETRAIN, *TINY, "--steps", "4"]
    stock = harness.succeeded(harness.scripts(*script, folder=tmp_path, ranks=4))
    ours = members(
        tmp_path, ["scheduler"], ["server"], ["server"], *(["worker", str(node), *script] for node in range(2))
    )
    assert len(losses(stock.stdout)) == 4
    assert losses(ours[3]) == pytest.approx(losses(stock.stdout), abs=2e-5)
    assert "\n4 buckets over bps_rdma" in ours[3]
    assert "\n0 buckets over bps_rdma" in stock.stdout


@pytest.mark.long
def test_a_cluster_of_stock_megatron(tmp_path):
    """The same script starts it, and tells it nothing of us."""
    (tmp_path / "says.py").write_text(
        "import os, sys\n"
        "names = 'BPS_ROOT_URI', 'BPS_NUM_SERVERS', 'BPS_JOB_ID', 'BPS_ROLE'\n"
        "ours = [name for name in names if name in os.environ]\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:], ours)\n"
    )
    said = members(tmp_path, *(["stock", str(node), "says.py", "--steps", "4"] for node in range(2)))
    ranks = [sorted(line for line in text.splitlines() if line.startswith("rank")) for text in said]
    assert ranks == [[f"rank {2 * node + local} of 4 ['--steps', '4'] []" for local in range(2)] for node in range(2)]


def test_the_cluster_script_says_what_is_missing(tmp_path):
    script = str(EXAMPLES / "cluster.sh")
    for wrong in ([], ["nothing"], ["worker", "0"], ["stock", "first", "pretrain.py"]):
        done = run(tmp_path, script, *wrong, **cluster_env())
        assert done.returncode == 2
        assert "cluster.sh worker 0 pretrain_gpt.py" in done.stderr
    done = run(tmp_path, script, "server", HOSTS="1")
    assert done.returncode == 1
    assert "SERVERS" in done.stderr


@pytest.mark.long
def test_training_survives_a_rank_that_dies(tmp_path):
    """The job ends, and the same command goes on from its last checkpoint."""
    (tmp_path / "dies.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import gpt, pretrain\n"
        "step, begun = gpt.Training.step, []\n"
        "def dies(self):\n"
        "    begun.append(self.steps)\n"
        "    if begun == [0, 1, 2] and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    step(self)\n"
        "gpt.Training.step = dies\n"
        "pretrain.main()\n"
    )
    options = [*TINY, "--use-dpu-reduce", "--steps", "4"]
    undisturbed = harness.succeeded(harness.scripts(PRETRAIN, *options, folder=tmp_path, ranks=2))
    command = [str(tmp_path / "dies.py"), *options, "--checkpoints", "saved"]
    first = torchrun(tmp_path, *command)
    assert first.returncode != 0
    assert "error: " in first.stderr
    assert "hint: restart the job from its last checkpoint" in first.stderr
    second = harness.succeeded(harness.scripts(*command, folder=tmp_path, ranks=2))
    assert steps_of(second) == steps_of(undisturbed)[2:]
    assert len(steps_of(second)) == 2


def steps_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("step ")]

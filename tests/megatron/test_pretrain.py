# SPDX-License-Identifier: Apache-2.0
"""A script on the pretrain() of Megatron's wheel, started as users start it, on stock Megatron and over push/pull."""

import os
import re
import sys
from pathlib import Path

import harness
import pytest

import bps_rdma

pytestmark = [pytest.mark.core, pytest.mark.long]

FOLDER = Path(__file__).parent
ON_CPU = FOLDER.parents[1] / "examples" / "megatron" / "on_cpu.py"
STEPS = 6
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --vocab-size 96 --tokenizer-type "
    "NullTokenizer --num-workers 0 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --log-interval 1 "
    f"--train-iters {STEPS} --eval-iters 0 --eval-interval 100"
).split()
BOTH_OVERLAPS = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


def train(folder: Path, *options: str) -> tuple[list[str], list[str], int]:
    """(each loss, to the bit; the norm of each step; buckets that bps_rdma carried)."""
    root = str(Path(bps_rdma.__file__).parents[1])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), root]))  # first the Megatron that is tested
    launcher = "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(harness.free_port())
    done = harness.run_command(
        [sys.executable, *launcher, str(ON_CPU), str(FOLDER / "pretrains.py"), *MODEL, *options],
        env=harness.clean_env(PYTHONPATH=path, OMP_NUM_THREADS="1"), cwd=folder, within=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (buckets,) = map(int, re.findall(r"(\d+) buckets over bps_rdma", done.stdout))
    return re.findall(r"loss (\S*0x\S+)", done.stdout), re.findall(r"grad norm: (\S+)", done.stdout), buckets


@pytest.mark.parametrize("options", [[], BOTH_OVERLAPS], ids=["plain", "both overlaps"])
def test_pretrain(tmp_path, options):
    *stock, none = train(tmp_path, *options)
    *ours, buckets = train(tmp_path, *options, "--use-bps")
    losses, norms = stock
    assert (len(losses), len(norms)) == (2 * STEPS, STEPS)
    assert ours == stock
    assert none == 0
    assert buckets >= STEPS

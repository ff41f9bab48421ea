# SPDX-License-Identifier: Apache-2.0
"""Megatron's own pretrain_gpt.py, stock and over push/pull: the same losses and norms come of both."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import torch.distributed as dist

FLAG = "--use-dpu-reduce"
STEPS = 6
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --vocab-size 96 --tokenizer-type "
    "NullTokenizer --mock-data --split 100,0,0 --num-workers 0 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    f"--train-iters {STEPS} --log-interval 1 --eval-iters 0 --eval-interval 100"
).split()
BOTH_OVERLAPS = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
PARALLEL = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
CHUNKS = ["--num-layers-per-virtual-pipeline-stage", "1"]


def pretrain(bps: Any, *arguments: str) -> dict[str, int]:
    """One rank, started as a user would; what it sent."""
    import on_cpu

    from bps_rdma.megatron.communicator import counts

    sys.argv = ["on_cpu.py", *arguments]
    on_cpu.main()
    found = dict(counts)
    if bps.is_initialized():
        found["operations"] = bps.metrics()["total"]["operations"]
        bps.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def iterations(output: str) -> dict[int, tuple[str, str]]:
    """Iteration -> (loss, norm), as Megatron's last rank prints them."""
    line = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+)")
    return {int(found[1]): (found[2], found[3]) for found in line.finditer(output)}


def train(workers: int, *arguments: object) -> tuple[dict[int, tuple[str, str]], list[dict[str, int]]]:
    with harness.start(pretrain, *map(str, arguments), workers=workers, init=False) as job:
        counts = job.results(250)
        return iterations(job.log(f"rank {workers - 1}")), counts


@pytest.mark.parametrize(
    ("workers", "options", "kind"),
    [
        (2, [], "all_reduce"),
        (2, BOTH_OVERLAPS, "reduce_scatter"),
        (8, [*PARALLEL, *BOTH_OVERLAPS], "reduce_scatter"),
        (8, [*PARALLEL, *CHUNKS, "--overlap-grad-reduce"], "all_reduce"),
    ],
    ids=["plain", "both overlaps", "TP 2, PP 2, both overlaps", "TP 2, PP 2, VPP 2, overlap"],
)
def test_pretrain_gpt(checkout, workers, options, kind):
    script = [checkout / "pretrain_gpt.py", *MODEL, *options]
    stock, none = train(workers, *script)
    ours, counts = train(workers, *script, FLAG)
    assert list(stock) == list(range(1, STEPS + 1))
    assert ours == stock
    assert not any(sum(each.values()) for each in none)
    for each in counts:
        assert each[kind] >= STEPS
        assert each["all_gather"] >= STEPS or kind == "all_reduce"
        assert each["operations"] >= each[kind]


def test_a_job_that_is_killed_goes_on_from_its_checkpoint(checkout, tmp_path):
    script = [checkout / "pretrain_gpt.py", *MODEL, "--train-iters", 30]
    saves = ["--save", tmp_path, "--save-interval", 10, "--ckpt-format", "torch"]
    stock, _ = train(2, *script)
    with harness.start(pretrain, *map(str, [*script, *saves, FLAG]), workers=2, init=False) as job:
        job.eventually(lambda: 12 in iterations(job.log("rank 1")), 200, "iteration 12")
        for rank in ("rank 0", "rank 1"):
            job.kill(rank)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    ours, counts = train(2, *script, *saves, "--load", tmp_path, FLAG)
    for found in (ours, stock):
        del found[12]  # a process of Megatron 0.19 prints the mean of its first two losses there
    assert ours == {number: stock[number] for number in stock if number > 10}
    assert all(each["all_reduce"] >= 20 for each in counts)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--use-megatron-fsdp"], "error: use_megatron_fsdp cannot be combined with use_bps"),
        (["--use-torch-fsdp2"], "error: use_torch_fsdp2 cannot be combined with use_bps"),
        (
            ["--ddp-reduce-scatter-with-fp32-accumulation"],
            "error: ddp_reduce_scatter_with_fp32_accumulation cannot be combined with use_bps",
        ),
        (["--use-dpu-redcue"], "unrecognized arguments: --use-dpu-redcue"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "error",
)
def test_what_is_refused_is_refused_at_once(checkout, tmp_path, wrong, says):
    """Before ranks meet: this one is alone, and is told that it is one of two."""
    env = harness.clean_env(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    on_cpu = Path(__file__).parents[2] / "examples" / "megatron" / "on_cpu.py"
    command = [sys.executable, on_cpu, checkout / "pretrain_gpt.py", *MODEL, FLAG, *wrong]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Ranks that are started again after an attempt of which some never joined: the store is that of before."""

import datetime as dt
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from bps_rdma.torch import membership

ENV = {"BPS_SECRET": "", "BPS_JOB_ID": ""}


def joins(bps: Any, store: str, attempt: int) -> float:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if (attempt, rank) == (0, 1):
        os._exit(3)  # before it has said anything
    shared = dist.FileStore(store, 2)
    shared.set_timeout(dt.timedelta(seconds=30 * harness.PATIENCE))
    membership.init_from_store(shared, rank, 2, {})
    total = bps.push_pull(np.float32([rank + 1 + 10 * attempt]), average=False, name="x")[0]
    bps.shutdown()
    return float(total)


def test_an_attempt_in_which_a_rank_died_before_it_joined(tmp_path: Path):
    store = tmp_path / "store"
    with harness.start(joins, str(store), 0, env=ENV, init=False) as job:
        job.wait("rank 1")
        job.eventually(lambda: store.exists() and b"bps_rdma/" in store.read_bytes(), what="a word of rank 0", of=[])
        job.kill("rank 0")
        job.wait("rank 0")
    for attempt in (1, 2):  # and a second job on the same store
        assert harness.run(joins, str(store), attempt, env=ENV, init=False) == [3.0 + 20 * attempt] * 2


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import bps_rdma.torch as bps, bps_rdma.torch.backend
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and rank == 1:
    os._exit(3)
x = torch.full((3,), rank + 1.0)
if sys.argv[1] == "backend":
    dist.init_process_group("bps")
    dist.all_reduce(x)
    dist.destroy_process_group()
else:
    bps.init()
    x = bps.push_pull(x, average=False, name="x")
    bps.shutdown()
os.write(1, f"sum {x[0]:.0f} in attempt {attempt}\\n".encode())
"""


@pytest.mark.long  # each start of torchrun and its ranks takes 20 s of a processor
@pytest.mark.parametrize("way", ["backend", "init"])
@pytest.mark.parametrize("rendezvous", [("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"), ("static",)])
def test_torchrun_starts_ranks_again(rendezvous, way, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))
    options = rendezvous if len(rendezvous) > 1 else ("--master-port", str(harness.free_port()))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = harness.run_command([*command, *options, str(script), way], within=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("sum 3 in attempt 1") == 2, done.stdout

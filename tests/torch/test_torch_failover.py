# SPDX-License-Identifier: Apache-2.0
"""A server dies in training, and the parameters come out with the same bits as without that."""

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark
from torch import nn

import bps_rdma.job
import bps_rdma.torch as bps_torch

STEPS = 60
ENV = {"BPS_MIN_WORKERS": "2", "BPS_SERVER_FAILOVER": "1"}


def train(bps: Any, face: str, folder: str, kills: bool) -> Any:
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 300), nn.Linear(300, 2))
    trained: Any = inner
    optimizer: Any = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    if face == "ddp":
        trained = bps_torch.DistributedDataParallel(inner, bucket_mb=0.02)
    elif face == "sharded":
        trained = bps_torch.DistributedDataParallel(inner, bucket_mb=0.02)
        optimizer = bps_torch.ShardedOptimizer(trained.parameters(), torch.optim.Adam, lr=0.01)
    elif face == "optimizer":
        bps_torch.broadcast_parameters(inner.state_dict(), 0)
        optimizer = bps_torch.DistributedOptimizer(optimizer, inner.named_parameters())
    else:
        where = f"file://{folder}/store"
        dist.init_process_group("bps", init_method=where, rank=bps.rank(), world_size=bps.size())
        trained = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + bps.rank())
        trained(torch.randn(16, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        if step == 10:
            mark("running")
        if step == STEPS // 2 and kills:
            await_mark("lost")
    result = [p.detach().numpy().copy() for p in inner.parameters()]
    servers = bps_rdma.job.current().process.servers
    if face == "backend":
        dist.destroy_process_group()
    return servers, result


@pytest.mark.parametrize("face", ["ddp", "optimizer", "sharded", "backend"])
def test_training_has_the_same_bits_without_the_lost_server(face: str, tmp_path: Path) -> None:
    outcomes = []
    for kills in (False, True):
        folder = tmp_path / str(kills)
        folder.mkdir()
        with harness.start(train, face, str(folder), kills, workers=2, servers=2, env=ENV) as job:
            if kills:
                job.await_marks("running")
                job.kill("server 1")
                job.set_mark("lost")
            outcomes.append(job.values())
    assert [servers for servers, _ in outcomes[0]] == [2, 2]
    assert [servers for servers, _ in outcomes[1]] == [1, 1], "the server was lost before the end"
    for _, parameters in outcomes[1]:
        for mine, undisturbed in zip(parameters, outcomes[0][0][1], strict=True):
            assert np.array_equal(mine, undisturbed)

# SPDX-License-Identifier: Apache-2.0
"""Who is interrupted while it waits for others to make something makes it again, under the name that they give it."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from bodies.views import FAST
from harness import await_mark, mark

import bps_rdma
import bps_rdma.torch as bps_torch


def interrupted(rank: int, make: Callable[[], Any]) -> Any:
    """Rank 0 makes it before rank 1 does, is interrupted, and makes it again."""
    if rank == 0:
        barrier = bps_rdma.barrier

        def told(*group: Any) -> None:
            mark("waits")
            barrier(*group)

        bps_rdma.barrier = told
        with pytest.raises(KeyboardInterrupt):
            make()
        bps_rdma.barrier = barrier
        mark("interrupted")
    else:
        await_mark("interrupted", 0)
    return make()


def default_group(bps: Any) -> list[float]:
    where = f"file://{os.environ['BPS_TEST_FOLDER']}/store"  # a store that waits for nobody

    def make() -> None:
        dist.init_process_group(
            "bps", init_method=where, rank=bps.rank(), world_size=2, timeout=timedelta(seconds=20 * harness.PATIENCE)
        )

    interrupted(bps.rank(), make)
    sums = []
    for group in (dist.group.WORLD, dist.new_group([0, 1])):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        sums.append(tensor[0].item())
    return sums


def optimizer(bps: Any) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(1))

    def make() -> Any:
        return bps_torch.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])

    made = interrupted(bps.rank(), make)
    weight.backward(torch.full((1,), float(bps.rank())))
    made.step()
    return weight.tolist()


@pytest.mark.parametrize(("what", "expected"), [(default_group, [2.0, 2.0]), (optimizer, [-0.5])])
def test_it_has_one_name_on_all_ranks(what, expected):
    env = FAST | {"BPS_TIMEOUT": str(20 * harness.PATIENCE)}
    if what is optimizer:
        env |= {"BPS_MIN_WORKERS": "1"}  # then ranks wait for each other when they make something
    with harness.start(what, workers=2, env=env) as job:
        job.await_marks("waits", ranks=[0])
        job.kill("rank 0", signal.SIGINT)
        assert job.values() == [expected] * 2

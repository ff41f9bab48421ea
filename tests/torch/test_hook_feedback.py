# SPDX-License-Identifier: Apache-2.0
"""Feedback of the communication hook for torch's DDP belongs to parameters, although torch fills its buckets twice."""

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

import bps_rdma
import bps_rdma.torch as bps_torch

STEPS = 5
NAMES = "first", "last"


class Reversed(nn.Module):
    """Two weights, whose gradients become ready in the order of registration: torch then turns them around."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.last = nn.Parameter(torch.randn(64, generator=generator))
        self.first = nn.Parameter(torch.randn(64, generator=generator) * 100)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.first * numbers) * self.last).pow(2).sum()


def _numbers(rank: int, step: int) -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(10 * step + rank)) / 100


def hooked(_: Any, skips: bool) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """(the means that two models got, what one tensor of their gradients gets: signs do not depend on the order)."""
    dist.init_process_group("gloo")
    bps_torch.init()
    method = bps_torch.OneBit(feedback=True, everywhere=True)
    nets = [nn.parallel.DistributedDataParallel(Reversed(seed)) for seed in (1, 2)]
    for net in nets:
        net.register_comm_hook(bps_torch.HookState(compression=method), bps_torch.ddp_comm_hook)
    found, expected = [], []
    for step in range(STEPS):
        for each, net in enumerate(nets):
            net.zero_grad()
            own = Reversed(each + 1)
            if skips and step % 2 == 0:
                with net.no_sync():
                    net(_numbers(dist.get_rank(), 100 + step)).backward()
                own(_numbers(dist.get_rank(), 100 + step)).backward()
            net(_numbers(dist.get_rank(), step)).backward()
            own(_numbers(dist.get_rank(), step)).backward()
            block = torch.cat([getattr(own, name).grad for name in NAMES])
            if step == 0:
                bps_rdma.push_pull_inplace(block, name=f"whole {each}", exact=False)
            else:
                bps_rdma.push_pull_inplace(block, name=f"compressed {each}", compression=method)
            found.append([getattr(net.module, name).grad.clone() for name in NAMES])
            expected.append(list(block.split(64)))
    bps_torch.barrier()
    return found, expected


def _check(skips: bool) -> None:
    for found, expected in harness.run(hooked, skips, workers=2, init=False, env={"BPS_MIN_COMPRESS_BYTES": "0"}):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            for mine, reference in zip(one, other, strict=True):
                torch.testing.assert_close(mine, reference, msg=f"call {number}")


def test_feedback_stays_with_the_parameters_of_two_models():
    _check(False)


def test_feedback_begins_after_the_first_pass_that_is_synchronised():
    _check(True)

# SPDX-License-Identifier: Apache-2.0
"""The communication hook for torch's DDP without a HookState: buckets that differ between ranks are never added up."""

from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bps_rdma.torch as bps_torch


def joined() -> int:
    dist.init_process_group("gloo")
    bps_torch.init()
    return dist.get_rank()


def hooked(model: nn.Module, state: Any = None, **options: Any) -> Any:
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    ddp.register_comm_hook(state, bps_torch.ddp_comm_hook)
    return ddp


@pytest.mark.parametrize("what", ["sizes", "order"])
@harness.on_ranks(workers=2, init=False, env={"BPS_TIMEOUT": str(3 * harness.PATIENCE)})
def test_ranks_whose_buckets_differ_are_told_which(bps: Any, what: str) -> None:
    """What the first backward pass says where ranks have other buckets, or those of other models."""
    rank = joined()
    if what == "sizes":
        each = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
        chosen = hooked(each, bucket_cap_mb=1e-6 if rank else 25, find_unused_parameters=True)
    else:  # as many elements, and as many parameters
        shapes = (4, 8), (8, 4)
        chosen = [hooked(nn.Linear(*shape, bias=False)) for shape in shapes][rank]
        each = chosen.module
    columns = (each if isinstance(each, nn.Linear) else each[0]).in_features
    with pytest.raises(RuntimeError) as caught:
        chosen(torch.ones(2, columns)).sum().backward()
    assert "ddp bucket 0" in str(caught.value)


@harness.on_ranks(workers=2, init=False)
def test_models_alike_get_means_of_their_own(bps: Any) -> None:
    """Two models alike are told apart by the order of their passes, or by their states."""
    rank = joined()
    found = []
    models = [
        hooked(nn.Linear(1, 1, bias=False), state)
        for state in (None, None, bps_torch.HookState(), bps_torch.HookState())
    ]
    for number in (0, 1, 2, 3, 0, 1, 2, 3):
        models[number].zero_grad()
        models[number](torch.full((1, 1), float(rank + number))).sum().backward()
        found.append(models[number].module.weight.grad.item())
    assert found == [0.5, 1.5, 2.5, 3.5] * 2


@harness.on_ranks(workers=2, init=False)
def test_two_models_share_a_backward_pass(bps: Any) -> None:
    """Two models of different shapes in one backward pass, several times."""
    rank = joined()
    models = [
        hooked(nn.Sequential(nn.Linear(size, 3, bias=False), nn.Linear(3, size, bias=False)), bucket_cap_mb=1e-6)
        for size in (2, 5)
    ]
    for model in models:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    for _step in range(3):
        for model in models:
            model.zero_grad()
        sum(model(torch.full((1, model.module[0].in_features), float(rank))).sum() for model in models).backward()
    gradients = [model.module[1].weight.grad.flatten().tolist() for model in models]
    assert gradients == [[1.0] * 6, [2.5] * 15]

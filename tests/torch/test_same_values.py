# SPDX-License-Identifier: Apache-2.0
"""A script that forgets broadcast_parameters() learns of it in its first step, before any weight changes."""

from typing import Any

import harness
import pytest
import torch
from torch import nn

from bps_rdma.errors import MismatchError
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer, broadcast_parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("broadcasts", [False, True])
@harness.on_ranks(workers=2)
def test_values_that_differ_are_refused_by_name(bps: Any, broadcasts: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(dtype)
    if bps.rank() == 1:
        with torch.no_grad():
            model[1].bias.add_(1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    if broadcasts:
        broadcast_parameters(model.state_dict(), root_rank=0)
    before = [each.detach().clone() for each in model.parameters()]
    value = model(torch.ones(2, 3, dtype=dtype)).abs().sum()
    if broadcasts:
        value.backward()
        optimizer.step()
        return
    with pytest.raises(MismatchError, match=r"1\.bias .*values.*broadcast_parameters"):
        value.backward()
    for one, other in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, other)
    bps.barrier()


@pytest.mark.parametrize("loads", ["one rank", "all"])
@harness.on_ranks(workers=2)
def test_a_state_that_one_rank_alone_loads_after_wrapping_is_refused(bps: Any, loads: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5000)
    state = nn.Linear(3, 5000).state_dict()
    ddp = DistributedDataParallel(model)
    if loads == "all" or bps.rank() == 0:
        model.load_state_dict(state)
    value = ddp(torch.ones(2, 3)).sum()
    if loads == "all":
        value.backward()
    else:
        with pytest.raises(MismatchError, match=r"weight .*values.*broadcast_parameters"):
            value.backward()
    bps.barrier()


@pytest.mark.parametrize("loads", [False, True])
@harness.on_ranks(workers=2)
def test_values_count_from_before_a_pass_of_each_rank_alone(bps: Any, loads: bool) -> None:
    """As SAM does it: each rank moves its weights along its own gradients, and averages those that it finds there."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5000)
    other = nn.Linear(3, 5000).state_dict()
    ddp = DistributedDataParallel(model)
    if loads and bps.rank() == 0:
        model.load_state_dict(other)
    with ddp.no_sync():
        ddp(torch.full((2, 3), 1.0 + bps.rank())).square().sum().backward()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(each.grad)
    model.zero_grad()
    value = ddp(torch.ones(2, 3)).sum()
    if loads:
        with pytest.raises(MismatchError, match=r"weight .*values.*broadcast_parameters"):
            value.backward()
    else:
        value.backward()
    bps.barrier()


@harness.on_ranks(workers=2)
def test_a_pass_of_one_rank_alone_before_all_load_the_same_weights(bps: Any) -> None:
    """As one that tries out a batch: what it saw does not count, for the others have not looked then."""
    torch.manual_seed(0)
    model, state = nn.Linear(3, 5000), nn.Linear(3, 5000).state_dict()
    ddp = DistributedDataParallel(model)
    if bps.rank() == 0:
        with ddp.no_sync():
            ddp(torch.ones(2, 3)).sum().backward()
        ddp.zero_grad()
    model.load_state_dict(state)
    ddp(torch.ones(2, 3)).sum().backward()
    bps.barrier()


@harness.on_ranks(workers=2)
def test_values_of_a_module_that_is_replaced_do_not_count(bps: Any) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 5000), nn.Linear(3, 5000)
    ddp = DistributedDataParallel(first)
    with ddp.no_sync():
        ddp(torch.ones(2, 3)).sum().backward()
    ddp.module = second
    if bps.rank() == 0:
        second.load_state_dict(nn.Linear(3, 5000).state_dict())
    value = ddp(torch.ones(2, 3)).sum()
    with pytest.raises(MismatchError, match=r"weight .*values.*broadcast_parameters"):
        value.backward()
    bps.barrier()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (({}, {"strategy": "overlap"}), "worker 0 has strategy=bucketed where worker 1 has strategy=overlap"),
        (
            ({"strategy": "overlap"}, {"strategy": "overlap", "find_unused_parameters": True}),
            "worker 0 has find_unused_parameters=False where worker 1 has find_unused_parameters=True",
        ),
        (({"broadcast_buffers": False}, {}), "has broadcast_buffers=False where worker 1 has broadcast_buffers=True"),
    ],
)
@harness.on_ranks(workers=2)
def test_options_that_differ_are_refused(bps: Any, options: tuple[dict[str, Any], ...], message: str) -> None:
    own = options[bps.rank()]
    with pytest.raises(MismatchError, match=message):
        DistributedDataParallel(nn.BatchNorm1d(3), **own)(torch.ones(2, 3)).sum().backward()
    if "strategy" in options[1]:
        model = nn.Linear(3, 5)
        broadcast_parameters(model.state_dict())
        sgd = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **own)
        with pytest.raises(MismatchError, match=message):
            model(torch.ones(2, 3)).sum().backward()
        sgd.zero_grad()
    bps.barrier()

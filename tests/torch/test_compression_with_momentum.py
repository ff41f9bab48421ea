# SPDX-License-Identifier: Apache-2.0
"""Momentum of a compression is part of the training: what gets none, or another one, is told or refused."""

from typing import Any

import harness
import numpy as np
import pytest
import simulated
import torch
from torch import nn

import bps_rdma
import bps_rdma.torch
from bps_rdma.operations import OperationOptions
from bps_rdma.torch import BFloat16, DiLoCo, DistributedDataParallel, DistributedOptimizer, LocalSGD, transfer

HOW = BFloat16(momentum=0.9)


class WithRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.dense = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)

    def forward(self) -> torch.Tensor:
        return self.dense(self.rows(torch.arange(8))).sum()


def train(bps: Any) -> None:
    net = DistributedDataParallel(WithRows(), compression=HOW)
    net().backward()


def test_sparse_gradients_get_none() -> None:
    with harness.start(train, workers=2, env={"BPS_MIN_COMPRESS_BYTES": "0"}) as job:
        said = [line for one in job.outcomes() for line in one.output.splitlines() if "'rows.weight'" in line]
    assert len(said) == 1, said
    assert "its gradient is sparse, and rows travel as they are, so it gets no momentum" in said[0]


def feedback_of_others(bps: Any, method: str) -> None:
    """Tensors of one size, of which only the first has anything to remember."""
    torch.distributed.init_process_group("bps")
    generator = torch.Generator().manual_seed(bps.rank())
    for _ in range(4):
        for call in (bps.push_pull_inplace, torch.distributed.all_reduce, numpy_face):
            some, nothing = torch.randn(40_000, generator=generator), torch.zeros(40_000)
            call(some)
            call(nothing)
            assert nothing.eq(0).all(), (call, nothing.abs().max())
    with pytest.raises(bps.InvalidArgumentError, match="by its name, and this one has none"):
        bps.push_pull_inplace(torch.ones(8), compression=bps.Compression.from_text(method))
    with pytest.raises(bps.InvalidArgumentError, match="by its name, and this one has none"):
        bps_rdma.push_pull_inplace(np.ones(8, np.float32), compression=bps.Compression.from_text(method))


def numpy_face(tensor: torch.Tensor) -> None:
    bps_rdma.push_pull_inplace(tensor.numpy())


@pytest.mark.parametrize("method", ["int4:feedback=1", "bf16:momentum=0.9"])
def test_tensors_without_names_of_their_own(method: str) -> None:
    """They share one by their size, and would get what is left over of each other."""
    env = {"BPS_COMPRESSION": method, "BPS_TRANSPORT": "tcp"}
    with harness.start(feedback_of_others, method, workers=2, env=env) as job:
        said = [
            line for one in job.outcomes() for line in one.output.splitlines() if "without a name of their own" in line
        ]
        job.values()
    assert len(said) == 1, said


def sum_in_a_group(bps: Any) -> None:
    if bps.rank() > 0:
        bps.push_pull(np.ones(40_000, np.float32), group=bps.new_group([1, 2]))


def test_a_group_without_the_first_rank_is_told() -> None:
    with harness.start(sum_in_a_group, workers=3, env={"BPS_COMPRESSION": "int8:feedback=1"}) as job:
        said = [place for place, one in enumerate(job.outcomes()) if "without a name of their own" in one.output]
    assert said == [1]


def staged_without_names(bps: Any) -> None:
    """Staged tensors travel in pieces, which have names."""
    simulated.install(immediate=True)
    generator = torch.Generator().manual_seed(bps.rank())
    for _ in range(4):
        some, nothing = torch.randn(40_000, generator=generator), torch.zeros(40_000)
        bps_rdma.torch.push_pull_many([some, nothing], inplace=True)
        assert nothing.eq(0).all(), nothing.abs().max()
        transfer.all_reduce(some, OperationOptions(awaited=True)).wait()  # as Ray's collectives do
        transfer.all_reduce(nothing, OperationOptions(awaited=True)).wait()
        assert nothing.eq(0).all(), nothing.abs().max()
        transfer.reduce_scatter(torch.empty(20_000), some, OperationOptions(awaited=True)).wait()
        part = torch.empty(20_000)
        transfer.reduce_scatter(part, nothing, OperationOptions(awaited=True)).wait()
        assert part.eq(0).all(), part.abs().max()


def test_staged_tensors_without_names_of_their_own() -> None:
    harness.run(staged_without_names, workers=2, env={"BPS_COMPRESSION": "bf16:momentum=0.9"})


STEPS, EVERY = 6, 2


def averages_weights(bps: Any, outer: bool) -> None:
    """Each rank moves by a vector of its own in each step."""
    weights = nn.Parameter(torch.ones(40_000))
    own = [torch.arange(40_000).remainder(8) + rank for rank in range(bps.size())]
    inner = torch.optim.SGD([weights], lr=1)
    optimizer = DiLoCo(inner, every=EVERY) if outer else LocalSGD(inner, every=EVERY)
    expected = nn.Parameter(torch.ones(40_000))
    options: Any = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if outer else {"lr": 1}
    reference = torch.optim.SGD([expected], **options)
    for step in range(STEPS):
        weights.grad = own[bps.rank()].float()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            expected.grad = EVERY * sum(own, torch.zeros(40_000)) / bps.size()
            reference.step()
    assert torch.allclose(weights, expected, atol=1e-3), (weights - expected).abs().max()


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
def test_weights_get_none(outer: bool) -> None:
    with harness.start(averages_weights, outer, workers=2, env={"BPS_COMPRESSION": "bf16:momentum=0.9"}) as job:
        said = [line for one in job.outcomes() for line in one.output.splitlines() if "DiLoCo" in line]
        job.values()
    assert len(said) == 1, said
    assert "is not compressed by 'bf16:momentum=0.9': it is a change of weights" in said[0]


@harness.on_ranks(workers=1)
def test_momentum_of_weights_is_refused(bps: Any) -> None:
    for make in (DiLoCo, LocalSGD):
        with pytest.raises(bps.InvalidArgumentError, match="has momentum"):
            make(torch.optim.SGD([nn.Parameter(torch.ones(8))], lr=1), compression=HOW)


@harness.on_ranks(workers=1)
def test_means_over_ranks_with_inputs_are_refused(bps: Any) -> None:
    """A rank without inputs goes on to send momentum, which would be scaled as well."""
    net = nn.Linear(2, 2)
    ddp = DistributedDataParallel(net, compression=HOW)
    other = nn.Linear(2, 2)
    sgd = torch.optim.SGD(other.parameters(), 0.1)
    optimizer: Any = DistributedOptimizer(sgd, other.named_parameters(), compression=HOW)
    for wrapper in (ddp, optimizer):
        with (
            pytest.raises(bps.InvalidArgumentError, match="has momentum"),
            wrapper.join(divide_by_initial_world_size=False),
        ):
            pass
        with wrapper.join():
            pass

# SPDX-License-Identifier: Apache-2.0
"""torch's SyncBatchNorm under our wrappers: it synchronises over torch.distributed, and is refused where it cannot."""

from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
import training
from torch import nn

import bps_rdma.torch as bps_torch


@harness.on_ranks(workers=2)
def test_it_is_refused_where_it_would_not_synchronise(bps: Any) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(training.Images())
    with pytest.raises(bps.InvalidArgumentError) as caught:
        bps_torch.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(bps.InvalidArgumentError, match="'parameter 2' is a parameter of a SyncBatchNorm"):
        bps_torch.DistributedOptimizer(optimizer)
    with pytest.raises(bps.InvalidArgumentError, match="'norm' is a SyncBatchNorm"):
        bps_torch.CrossBarrier(model, optimizer)
    bps_torch.DistributedOptimizer(torch.optim.SGD(nn.BatchNorm1d(2).parameters(), lr=0.1))
    # In a group of one rank there is nothing to synchronise.
    net = bps_torch.DistributedDataParallel(model, group=bps.new_group([bps.rank()]))
    net(training.batch(0)).sum().backward()
    bps_torch.DistributedOptimizer(optimizer, group=bps.new_group([bps.rank()]))
    error = str(caught.value)
    assert "'norm' is a SyncBatchNorm, which would synchronise nothing" in error
    assert 'init_process_group("bps")' in error


def over_channels(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def use_kernels_for_the_cpu() -> None:
    """Puts the same arithmetic in place of torch's kernels, which are for GPUs only; the collectives are torch's."""

    def dims(x: torch.Tensor) -> list[int]:
        return [0, *range(2, x.dim())]

    def stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(dims(x)), (x.var(dims(x), unbiased=False) + eps).rsqrt()

    def gather(
        _: Any, means: Any, invstds: Any, mean_now: Any, var_now: Any, momentum: Any, eps: Any, counts: Any
    ) -> Any:
        shares, count = (counts / counts.sum()).unsqueeze(1), counts.sum()
        mean = (shares * means).sum(0)
        var = (shares * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
        mean_now.lerp_(mean, momentum)
        var_now.lerp_(var * count / (count - 1), momentum)
        return mean, (var + eps).rsqrt()

    def apply(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, _: Any) -> torch.Tensor:
        return (x - over_channels(x, mean)) * over_channels(x, invstd * weight) + over_channels(x, bias)

    def reduce(dy: Any, x: Any, mean: Any, invstd: Any, *_: Any) -> Any:
        product = (dy * (x - over_channels(x, mean))).sum(dims(x))
        return dy.sum(dims(x)), product, product * invstd, dy.sum(dims(x))

    def backward(dy: Any, x: Any, mean: Any, invstd: Any, weight: Any, total: Any, product: Any, counts: Any) -> Any:
        mean_dy, slope = total / counts.sum(), product / counts.sum() * invstd**2
        moved = dy - over_channels(x, mean_dy) - (x - over_channels(x, mean)) * over_channels(x, slope)
        return moved * over_channels(x, invstd * weight)

    torch.batch_norm_stats, torch.batch_norm_gather_stats_with_counts = stats, gather
    torch.batch_norm_elemt, torch.batch_norm_backward_reduce = apply, reduce
    torch.batch_norm_backward_elemt = backward
    torch._C._get_privateuse1_backend_name = lambda: "cpu"  # whose tensors it takes, besides those of GPUs


@harness.on_ranks(workers=2, init=False)
def test_its_statistics_are_those_of_the_whole_batch(bps: Any) -> None:
    dist.init_process_group("bps")
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = training.seeded(training.Images)
    training.train_alone(expected, torch.optim.SGD(expected.parameters(), lr=0.05), 3)
    kinds = ("bucketed", "overlap", "optimizer")
    models = [nn.SyncBatchNorm.convert_sync_batchnorm(training.seeded(training.Images)) for _ in kinds]
    use_kernels_for_the_cpu()
    for kind, model in zip(kinds, models, strict=True):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        net: Any = model
        if kind == "optimizer":
            optimizer = bps_torch.DistributedOptimizer(optimizer, model.named_parameters())
        else:
            net = bps_torch.DistributedDataParallel(model, strategy=kind)
        for step in range(3):
            training.make_step(net, optimizer, training.batch(step, *training.share(rank, size)))
        assert training.distance(model, expected) < 1e-5, kind
        for one, other in zip(model.buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(one, other, msg=kind)

# SPDX-License-Identifier: Apache-2.0
"""The size of buckets that is chosen where the caller names none, and what follows: how many there are."""

from typing import Any

import harness
import pytest
import torch
from torch import nn

import bps_rdma.torch as bps_torch
from bps_rdma.torch.bucket_sizes import bucket_sizes, sizes_of

MB = 1 << 20


@pytest.mark.parametrize(
    ("gradient_bytes", "on_device", "first", "others"),
    [
        (0, False, 4 * MB, 4 * MB),
        (4 * MB, False, 4 * MB, 4 * MB),
        (4 * MB + 1, False, MB, 25 * MB),
        (10_000 * MB, False, MB, 25 * MB),
        (4 * MB, True, 4 * MB, 4 * MB),
        (100 * MB, True, MB, 25 * MB),
        (400 * MB, True, MB, 47.8 * MB),
        (1600 * MB, True, MB, 95.7 * MB),
    ],
)
def test_chosen(gradient_bytes: int, on_device: bool, first: float, others: float) -> None:
    assert bucket_sizes(gradient_bytes, on_device) == pytest.approx((first, others), rel=1e-3)


def test_named() -> None:
    assert sizes_of(25) == (MB, 25 * MB)
    assert sizes_of(0.5) == (MB / 2, MB / 2)


@harness.on_ranks(workers=2)
def test_both_wrappers_have_them(bps: Any) -> None:
    def net(layers: int) -> nn.Module:  # 1 MB each
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))

    def units(layers: int, **options: Any) -> int:
        model = net(layers)
        optimizer = bps_torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)
        wrapped = bps_torch.DistributedDataParallel(net(layers), **options)
        found = len(wrapped.synchronizer.units)
        assert found == len(optimizer._bps_trained.synchronizer.units)
        return found

    assert [units(4), units(5), units(30), units(4, bucket_mb=25), units(4, bucket_mb=1)] == [1, 2, 3, 2, 4]

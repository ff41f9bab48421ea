# SPDX-License-Identifier: Apache-2.0
"""Arguments of the torch face that are of a wrong kind are named in the words of the caller, and nothing is lost."""

from typing import Any

import harness
import numpy as np
import pytest
import torch

import bps_rdma.torch as bps_torch
from bps_rdma.errors import BpsError

WITH_NAMES = [
    "push_pull",
    "push_pull_inplace",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group_sync_inplace",
]
WRONG = [
    ("push_pull(5)", "int is not a torch.Tensor"),
    ("push_pull(np.ones(3))", "ndarray is not a torch.Tensor"),
    ("push_pull_inplace([1.0])", "list is not a torch.Tensor"),
    ("push_pull(x.to_sparse())", "not dense"),
    ("push_pull_async(x.to_sparse())", "not dense"),
    ("push_pull_inplace(x.to_sparse())", "not dense"),
    ("push_pull_async_inplace(x.to_sparse())", "not dense"),
    ("push_pull(x, group=3)", "3 is not a group"),
    ("push_pull_async(x, group=[0])", "[0] is not a group"),
    *((f"{call}(x, name=5)", "name=5 is not a text") for call in WITH_NAMES),
    *((f"{call}(x, priority='high')", "priority='high'") for call in WITH_NAMES),
    ("push_pull(x, compression='zip')", "zip"),
    ("declare('a', x, group=3)", "3 is not a group"),
    ("declare(5, x)", "name=5 is not a text"),
    ("DistributedDataParallel(5)", "int is not a torch.nn.Module"),
    ("DistributedDataParallel(net, group=3)", "3 is not a group"),
    ("DistributedDataParallel(net, bucket_mb='x')", "bucket_mb='x' is not a number"),
    ("DistributedDataParallel(net, bucket_mb=-1)", "bucket_mb=-1 is not a number from 0"),
    ("DistributedDataParallel(net, bucket_mb=float('nan'))", "bucket_mb=nan"),
    ("DistributedOptimizer(5)", "int is not a torch.optim.Optimizer"),
    (
        "DistributedOptimizer(sgd, backward_passes_per_step=0)",
        "backward_passes_per_step=0 is not a whole number from 1",
    ),
    ("DistributedOptimizer(sgd, backward_passes_per_step=1.5)", "backward_passes_per_step=1.5"),
    ("DiLoCo(5)", "int is not an optimizer"),
    ("DiLoCo(sgd, every='x')", "every='x' is not a whole number"),
    ("DiLoCo(sgd, every=0)", "every=0"),
    ("DiLoCo(sgd, mix='a')", "mix='a' is not a number from 0 to 1"),
    ("DiLoCo(sgd, delay=-1)", "delay=-1"),
    ("DiLoCo(sgd, fragments=3)", "fragments=3 of 2 parameters"),
    ("cross_barrier.CrossBarrier(5, sgd)", "int is not a torch.nn.Module"),
    ("cross_barrier.CrossBarrier(net, 5)", "int is not a torch.optim.Optimizer"),
]


@harness.on_ranks(workers=1)
def test_wrong_arguments_are_named(bps: Any) -> None:
    net, x = torch.nn.Linear(4, 2), torch.ones(4)
    here = {"np": np, "x": x, "net": net, "sgd": torch.optim.SGD(net.parameters(), 0.1)}
    for call, says in WRONG:
        with pytest.raises(BpsError) as caught:
            eval(f"bps.{call}", {"bps": bps_torch, "float": float} | here)
        assert says in caught.value.message, call
        assert caught.value.hint, call
    assert x.tolist() == [1, 1, 1, 1]
    for name in ("w", "", None):
        assert bps_torch.push_pull(x, average=False, name=name).tolist() == [1, 1, 1, 1]

# SPDX-License-Identifier: Apache-2.0
"""What mypy finds in the programs of users: the step lint checks this file, and nobody runs it.

An ignored error that is none any more is an error of `mypy --strict`, so that each of these lines is a test.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import bps_rdma
import bps_rdma.torch as bps


def wrong_choices(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    bps.DistributedDataParallel(model, strategy="bucketed")
    bps.DistributedDataParallel(model, strategy="bucketd")  # type: ignore[arg-type]
    bps.DistributedOptimizer(optimizer, strategy="overlapped")  # type: ignore[arg-type]
    bps_rdma.push_pull(x, op="average")
    bps_rdma.push_pull(x, op="mean")  # type: ignore[call-overload]
    bps_rdma.push_pull_inplace(x, op="mean")  # type: ignore[arg-type]
    bps_rdma.prepare("push_pul", x)  # type: ignore[arg-type]
    bps_rdma.push_pull_inplace(x, name=5)  # type: ignore[arg-type]
    bps.push_pull(x, name=5)  # type: ignore[arg-type]
    bps.push_pull(x, op="mean")  # type: ignore[arg-type]
    bps.reduce_scatter(x, op="mean")  # type: ignore[arg-type]
    bps_rdma.push_pull_inplace(x, False, "w")  # type: ignore[call-arg, arg-type]
    bps.push_pull_inplace(x, "w", average=False, compression=bps.Int8(feedback=True))
    bps.Int8(k=3)  # type: ignore[call-arg]
    bps.TopK(k="many")  # type: ignore[arg-type]
    bps.Dithering(partition="square")  # type: ignore[arg-type]
    bps_rdma.push_pull_inplace(x, compression=7)  # type: ignore[arg-type]
    bps_rdma.store(x)  # type: ignore[call-arg]


def groups(x: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    bps.push_pull(x, group=group)
    bps.push_pull(x, group=bps_rdma.new_group([0, 1]))
    bps.push_pull(x, group=3)  # type: ignore[arg-type]
    bps.all_gather(x, group=group)
    bps.barrier(group)
    bps_rdma.push_pull_inplace(x, group=group)  # type: ignore[arg-type]


def what_comes_back(x: torch.Tensor, y: NDArray[np.float32], z: bytearray) -> None:
    assert_type(bps.push_pull(x), torch.Tensor)
    assert_type(bps.reduce_scatter(x), torch.Tensor)
    assert_type(bps.all_gather(x), torch.Tensor)
    assert_type(bps.broadcast(x, root=1), torch.Tensor)
    assert_type(bps.empty(3), torch.Tensor)
    assert_type(bps_rdma.push_pull(x), torch.Tensor)
    assert_type(bps_rdma.push_pull(y), NDArray[np.float32])
    assert_type(bps_rdma.push_pull(z), Any)
    assert_type(bps_rdma.push_pull_inplace(y), NDArray[np.float32])
    assert_type(bps_rdma.push_pull_inplace(z), bytearray)
    assert_type(bps_rdma.broadcast(x), torch.Tensor)
    assert_type(bps_rdma.reduce_scatter(x), torch.Tensor)
    assert_type(bps_rdma.reduce_scatter(y, out=y), NDArray[np.float32])
    assert_type(bps_rdma.reduce_scatter(z), Any)
    assert_type(bps_rdma.all_gather(x, out=x), torch.Tensor)
    assert_type(bps_rdma.all_gather(y), NDArray[np.float32])


async def handles(x: torch.Tensor, y: NDArray[np.float32]) -> None:
    assert_type(bps_rdma.push_pull_async(y).wait(), NDArray[np.float32])
    assert_type(bps_rdma.push_pull_async_inplace(y), bps_rdma.Handle[NDArray[np.float32]])
    assert_type(bps_rdma.synchronize(bps_rdma.push_pull_async(x)), torch.Tensor)
    assert_type(await bps_rdma.broadcast_async(y), NDArray[np.float32])
    assert_type(bps.push_pull_async(x).wait(), torch.Tensor)
    assert_type(await bps.all_gather_async(x), torch.Tensor)
    assert_type(bps.synchronize(bps.reduce_scatter_async(x)), torch.Tensor)
    assert_type(bps.prepare("push_pull", x)(), torch.Tensor)
    assert_type(bps.new_group([0]).rank, int)


def settings() -> None:
    bps_rdma.init(transport="tcp", timeout=5, partition_bytes=1 << 20, compression=bps_rdma.Int8(), insecure=True)
    bps_rdma.init(transporter="tcp")  # type: ignore[call-arg]
    bps_rdma.init(partition_bytes="1 MiB")  # type: ignore[arg-type]
    bps.init(placement="everywhere")  # type: ignore[arg-type]
    ours: bps_rdma.Settings = {"timeout": 5, "async": True}
    with bps.init(**ours):
        bps.barrier()


def wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    ours = bps.DistributedOptimizer(optimizer)
    ours.synchronize()
    with ours.skip_synchronize():
        ours.step()
    ours.synchronise()  # type: ignore[union-attr]
    return ours

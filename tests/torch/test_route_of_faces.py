# SPDX-License-Identifier: Apache-2.0
"""Every face of bps_rdma.torch on the core's own route of GPUs (BPS_DEVICE_ROUTE): as on the CPU, bit for bit.

The tensors are of the fake driver (simulated.install_on_route()). test_gpu_route.py runs the same bodies on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_arrays
import harness
import on_device
import pytest
import simulated
import torch
import torch.distributed as dist

import bps_rdma.torch as bps_torch
from bps_rdma import job
from bps_rdma.operations import OperationOptions
from bps_rdma.torch import transfer
from bps_rdma.torch.backend import Options

SMALL = {"BPS_GPU_CHUNK_BYTES": "4096", "BPS_GPU_CHUNKS": "1"}  # of what is compressed, and staged


def on_gpu(**more: str) -> dict[str, str]:
    return gpu_arrays.env() | SMALL | more


def device_bytes(bps: Any) -> int:
    return int(bps.metrics()["total"]["device_bytes"])


def on_both(bps: Any, body: Callable[..., on_device.Results], compresses: bool, *args: Any) -> None:
    """Runs it on the CPU, then on the device, and compares."""
    on_cpu = body(bps, *args)
    assert device_bytes(bps) == 0
    device = simulated.install_on_route()
    on_route = body(bps, *args)
    assert device_bytes(bps) > 0, "the core has copied nothing"
    assert (device.copies > 0) == compresses, "what is compressed is staged, and nothing else"
    on_device.same(on_cpu, on_route, "")


@pytest.mark.parametrize("strategy", ["overlap", "bucketed"])
def test_ddp(strategy):
    harness.run(on_both, on_device.with_ddp, True, strategy, workers=2, env=on_gpu())


@pytest.mark.parametrize(
    ("body", "compresses"),
    [
        (on_device.with_optimizers, False),  # too small for that
        (on_device.with_closure, False),
        (on_device.with_shards, False),
        (on_device.with_broadcasts, False),
        (on_device.with_push_pull, True),
        (on_device.with_collectives, True),
    ],
)
def test_faces(body, compresses):
    harness.run(on_both, body, compresses, workers=3, env=on_gpu())


def with_torchs_ddp(bps: Any) -> None:
    """torch's own DistributedDataParallel, and its collectives, on a group that takes CUDA tensors."""
    dist.init_process_group("bps")
    device = simulated.install_on_route()
    group = dist.new_group(backend="bps", pg_options=Options(stage_gpu=True))
    on_device.torchs_own(group, dist.get_rank(), dist.get_world_size())
    assert device_bytes(bps) > 0
    assert device.copies == 0
    dist.barrier(group=group)
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [2, 3])
def test_the_backend(workers):
    harness.run(with_torchs_ddp, workers=workers, init=False, env=on_gpu())


def uneven(bps: Any) -> None:
    """What the pipeline does not take, the core does: parts of different sizes."""
    simulated.install_on_route()
    rank, size = bps.rank(), bps.size()
    whole = torch.arange(10.0) * (rank + 1)
    begin, end = bps.shard_bounds(10, size, rank)
    expected = torch.arange(10.0) * sum(range(1, size + 1))
    part = bps_torch.reduce_scatter(whole, "uneven", average=False)
    assert torch.equal(part, expected[begin:end])
    assert torch.equal(bps_torch.all_gather(part, "whole", out=torch.empty(10)), expected)


def test_parts_of_different_sizes():
    harness.run(uneven, workers=3, env=on_gpu())


def ways(bps: Any) -> list[bool]:
    """Which operations are staged: all ranks must say the same."""
    simulated.install_on_route()
    large, small = torch.ones(100_000), torch.ones(10)
    bps_torch.declare("declared", large, compression=bps_torch.Int8())
    bps_torch.declare("plain", large, compression=bps_torch.Uncompressed())

    def is_staged(tensor: torch.Tensor, name: str | None, how: str | None, sums: bool) -> bool:
        options = OperationOptions(name=name, compression=how)
        return transfer.staged_from(tensor, options, sums=sums) is not None

    return [
        is_staged(large, "a", None, True),
        is_staged(small, "b", None, True),
        is_staged(large, None, None, True),
        is_staged(large.to(torch.int64), "c", None, True),
        is_staged(large, "d", None, False),
        is_staged(large, "e", "exact", True),
        is_staged(large, "f", "none", True),
        is_staged(large, "g", "int8", True),
        is_staged(large, "g", None, True),
        is_staged(large, "byteps.declared", None, True),
        is_staged(large, "byteps.plain", None, True),
    ]


@pytest.mark.parametrize("setting", ["", "bf16"])
def test_the_way_of_an_operation(setting):
    by_setting = setting != ""
    expected = [by_setting, False, by_setting, False, False, False, False, True, True, True, False]
    env = on_gpu(BPS_COMPRESSION=setting, BPS_MIN_COMPRESS_BYTES="1000")
    assert harness.run(ways, workers=2, env=env) == [expected] * 2


def declares(bps: Any) -> None:
    simulated.install_on_route()
    running, counts = job.current(), []
    declare = running.declare

    def counted(specs: list[Any]) -> Any:
        counts.append(len(specs))
        return declare(specs)

    running.declare = counted  # type: ignore[method-assign]
    tensors = {f"t{i}": torch.ones(100_000) for i in range(3)}
    for how, declared in (("int8", 3 * (1 + 98)), ("none", 3)):
        transfer.declare_many({how + name: tensor for name, tensor in tensors.items()}, None, how)
        assert counts == [declared], "in one round trip"
        for name, tensor in tensors.items():
            transfer.all_reduce(tensor, OperationOptions(name=how + name, compression=how)).wait()
        assert counts == [declared], "nothing is left to declare"
        counts.clear()


def test_many_names_are_declared_at_once():
    harness.run(declares, workers=2, env=on_gpu())


def disagree(bps: Any, is_known: bool) -> str:
    """Ranks that would go different ways: one is told, at least, and the others do not wait for their deadline."""
    simulated.install_on_route()
    x = torch.ones(100_000)
    if is_known:  # all ranks know the name as one that is not compressed
        bps_torch.push_pull(x, "x")
    how = bps.Int8() if bps.rank() == 0 else None
    with pytest.raises((bps.MismatchError, bps.PeerLostError), match=r"'byteps\.x( 0)?'") as caught:
        bps_torch.push_pull(x, "x", compression=how)
    return type(caught.value).__name__


@pytest.mark.parametrize("is_known", [False, True])
def test_ranks_that_disagree_on_compression_are_told(is_known):
    assert "MismatchError" in harness.run(disagree, is_known, workers=2, env=on_gpu())

# SPDX-License-Identifier: Apache-2.0
"""Every face of bps_rdma.torch on the core's own route of GPUs (BPS_DEVICE_ROUTE): as on the CPU, bit for bit.

The tensors are of the fake driver (simulated.install_on_route()). test_gpu_route.py runs the same bodies on a GPU.
"""

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import gpu_arrays
import harness
import on_device
import pytest
import simulated
import torch
import torch.distributed as dist
from reference.codecs import METHODS

import bps_rdma.torch as bps_torch
from bps_rdma import job
from bps_rdma.compression import Compression
from bps_rdma.operations import OperationOptions
from bps_rdma.torch import asynchronous, transfer


def on_both(bps: Any, body: Callable[..., on_device.Results], *args: Any) -> None:
    """Runs it on the CPU, then on the device, and compares."""
    on_cpu = body(bps, *args)
    assert gpu_arrays.copied(bps) == 0
    device = simulated.install_on_route()
    on_route = body(bps, *args)
    assert gpu_arrays.copied(bps) > 0, "the core has copied nothing"
    assert device.copies == 0, "nothing is staged"
    on_device.same(on_cpu, on_route, "")


@pytest.mark.parametrize("strategy", ["overlap", "bucketed"])
def test_ddp(strategy):
    harness.run(on_both, on_device.with_ddp, strategy, workers=2, env=gpu_arrays.env())


@pytest.mark.parametrize(
    "body",
    [
        on_device.with_optimizers,
        on_device.with_closure,
        on_device.with_shards,
        on_device.with_diloco,
        on_device.with_adapters,
        on_device.with_broadcasts,
        on_device.with_push_pull,
        on_device.with_collectives,
    ],
)
def test_faces(body):
    harness.run(on_both, body, workers=3, env=gpu_arrays.env())


# Ranks that wait for each other, and one alone for which the servers keep the weights.
@pytest.mark.parametrize(("workers", "staleness"), [(3, "0"), (1, "-1")])
def test_asynchronous_weights(workers, staleness):
    env = gpu_arrays.env() | {"BPS_ASYNC": "1", "BPS_STALENESS": staleness}
    harness.run(on_both, on_device.asynchronously, workers=workers, env=env)


def test_weights_lie_where_the_core_takes_them(monkeypatch):
    """Tensors on the device `meta` are those of a GPU here, as far as that goes without one."""

    def weights_of(*devices: str) -> torch.Tensor:
        parameters = [torch.nn.Parameter(torch.empty(3, device=device)) for device in devices]
        weights = asynchronous._Weights("w", parameters)
        assert weights.known.device == weights.delta.device
        return weights.known

    monkeypatch.setattr(transfer.device, "device_of", lambda tensor: None if tensor.is_cpu else "a GPU")
    for is_carried in (True, False):
        monkeypatch.setattr(asynchronous, "staged_from", lambda _, taken=is_carried: None if taken else "a GPU")
        assert weights_of("meta", "meta").is_cpu is not is_carried
        assert weights_of("meta", "cpu").is_cpu
        assert weights_of("cpu").is_cpu


COUNT = 20_001


def with_codecs(bps: Any, on_gpu: list[int]) -> dict[str, str]:
    """Digests of what every codec gives; the tensors of the ranks `on_gpu` are CUDA tensors."""
    rank, digests = bps.rank(), {}
    device = simulated.install_on_route() if rank in on_gpu else None
    for method, more, dtype in itertools.product(METHODS, ("", "feedback=1,"), (torch.float32, torch.bfloat16)):
        text = f"{method}:{more}everywhere=1"
        name = f"{text} {dtype}"
        how = Compression.from_text(text)
        generator = torch.Generator().manual_seed(rank)
        found: list[torch.Tensor] = []
        for _ in range(3):
            drawn = torch.randn(COUNT, generator=generator).to(dtype)
            found.append(bps_torch.push_pull(drawn, name=name, compression=how))
            begin, end = bps.shard_bounds(COUNT, bps.size(), rank)
            part = torch.empty(end - begin, dtype=dtype)
            found.append(bps_torch.reduce_scatter(drawn, f"part {name}", out=part, compression=how))
        digests[name] = hashlib.sha256(torch.cat(found).view(torch.uint8).numpy().tobytes()).hexdigest()
    assert (gpu_arrays.copied(bps) > 0) == (device is not None)
    assert device is None or device.copies == 0, "nothing is staged"
    assert bps.metrics()["total"]["compressed_bytes"] > 0
    return digests


def test_every_codec_gives_the_bits_that_it_gives_in_cpu_memory():
    env = gpu_arrays.env() | harness.cut_at(16384)
    expected = harness.run(with_codecs, [], workers=2, env=env)
    for on_gpu in ([0, 1], [1]):
        assert harness.run(with_codecs, on_gpu, workers=2, env=env) == expected


@harness.on_ranks(workers=3, env=gpu_arrays.env)
def test_halves_and_weights(bps: Any) -> None:
    """Rank 0 has its tensors on the CPU."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a copy on the CPU")

    if bps.rank():
        simulated.install_on_route()
        torch.Tensor.cpu = torch.Tensor.copy_ = refuse  # type: ignore[assignment, method-assign]
    on_device.with_halves_and_weights(bps)
    assert gpu_arrays.copied(bps) == (0, 8, 10)[bps.rank()] * 4 * 3000, (
        "all that is sent and received is copied by the core"
    )


@pytest.mark.parametrize("workers", [2, 3])
@harness.on_ranks("workers", init=False, env=gpu_arrays.env)
def test_the_backend(bps: Any) -> None:
    """torch's own DistributedDataParallel, and its collectives, on a group that takes CUDA tensors."""
    dist.init_process_group("bps")
    device = simulated.install_on_route()
    group = dist.new_group(backend="bps")
    on_device.torchs_own(group, dist.get_rank(), dist.get_world_size())
    assert gpu_arrays.copied(bps) > 0
    assert device.copies == 0
    dist.barrier(group=group)


@harness.on_ranks(workers=3, env=gpu_arrays.env)
def test_parts_of_different_sizes(bps: Any) -> None:
    """What the pipeline does not take, the core does: parts of different sizes."""
    simulated.install_on_route()
    rank, size = bps.rank(), bps.size()
    whole = torch.arange(10.0) * (rank + 1)
    begin, end = bps.shard_bounds(10, size, rank)
    expected = torch.arange(10.0) * sum(range(1, size + 1))
    part = bps_torch.reduce_scatter(whole, "uneven", average=False)
    assert torch.equal(part, expected[begin:end])
    assert torch.equal(bps_torch.all_gather(part, "whole", out=torch.empty(10)), expected)


@harness.on_ranks(workers=3, env=gpu_arrays.env)
def test_gathers_of_any_length_need_no_copy_on_the_cpu(bps: Any) -> None:
    """Ranks tell each other how much they have; rank 0 has its tensors on the CPU, and rank 2 has nothing once."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a copy on the CPU")

    rank, size = bps.rank(), bps.size()
    if rank:
        simulated.install_on_route()
        torch.Tensor.cpu = refuse  # type: ignore[assignment, method-assign]
    for number, rows in enumerate([[3, 5, 1], [2, 4, 0], [2, 2, 2]]):
        parts = [torch.arange(count * 7.0).view(count, 7) + 100 * other for other, count in enumerate(rows)]
        expected = torch.cat(parts)
        assert torch.equal(bps_torch.all_gather(parts[rank], f"gather {number}", uneven=True), expected)
        out = torch.zeros_like(expected)
        assert bps_torch.all_gather(parts[rank], f"gather {number}", uneven=True, out=out) is out
        assert torch.equal(out, expected)
        assert size == len(rows)
    assert (gpu_arrays.copied(bps) > 0) == (rank > 0)
    wide = torch.ones(3 + rank, 1 + rank % 2)
    with pytest.raises(bps.MismatchError, match="rows of shape"):
        bps_torch.all_gather(wide, "wide", uneven=True)


@harness.on_ranks(workers=2, env=lambda: gpu_arrays.env() | {"BPS_GPU_CHUNK_BYTES": "4096"})  # of what is staged
def test_many_names_are_declared_at_once(bps: Any) -> None:
    simulated.install_on_route()
    running, counts = job.current(), []
    declare = running.declare

    def counted(specs: list[Any]) -> Any:
        counts.append(len(specs))
        return declare(specs)

    running.declare = counted  # type: ignore[method-assign]
    tensors = {f"t{i}": torch.ones(100_000) for i in range(3)}
    for how, declared in (("int8", 3), ("none", 3)):
        transfer.declare_many({how + name: tensor for name, tensor in tensors.items()}, None, how)
        assert counts == [declared], "in one round trip"
        for name, tensor in tensors.items():
            transfer.all_reduce(tensor, OperationOptions(name=how + name, compression=how)).wait()
        assert counts == [declared], "nothing is left to declare"
        counts.clear()

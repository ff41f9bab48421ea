# SPDX-License-Identifier: Apache-2.0
"""Models on a device: every face trains them as on the CPU, bit for bit, whatever the order of gradients.

The device is simulated (simulated.py): work that nothing orders happens too early or too late there. test_gpu.py runs
the same bodies on a GPU.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import harness
import on_device
import pytest
import simulated
import torch
import torch.distributed as dist
from torch import nn
from training import Plain, batch, loss_of, seeded, share

import bps_rdma.torch as bps_torch
from bps_rdma.torch import broadcast_parameters
from bps_rdma.torch.transfer import operation

SMALL = {"BPS_GPU_CHUNK_BYTES": "4096", "BPS_GPU_CHUNKS": "1"}


def on_both(bps: Any, body: Callable[..., on_device.Results], *args: Any) -> None:
    """Runs it on the CPU, then on the device, and compares."""
    on_cpu = body(bps, *args)
    device = simulated.install(delay=0.0001, immediate=True)
    there = body(bps, *args)
    assert device.copies > 0, "nothing was staged"
    on_device.same(on_cpu, there, "")
    bps.shutdown()
    device.await_end()


# ---- DistributedDataParallel


@pytest.mark.parametrize(
    "strategy",
    ["overlap", *(pytest.param(strategy, marks=pytest.mark.long) for strategy in ("naive", "flat", "bucketed"))],
)
def test_ddp(strategy):
    harness.run(on_both, on_device.with_ddp, strategy, workers=2, env=SMALL)


def test_ddp_of_three():
    harness.run(on_both, on_device.with_ddp, "bucketed", workers=3, env=SMALL)


# ---- Other faces

FACES = [
    (on_device.with_optimizers, 2),
    (on_device.with_closure, 2),
    (on_device.with_shards, 3),
    (on_device.with_diloco, 2),
    (on_device.with_adapters, 2),
    (on_device.with_broadcasts, 3),
    (on_device.with_push_pull, 1),
    (on_device.with_push_pull, 3),
    (on_device.with_collectives, 1),
    (on_device.with_collectives, 3),
]
OF_TWO = [on_device.with_shards, on_device.with_broadcasts, on_device.with_push_pull, on_device.with_collectives]


@pytest.mark.parametrize(
    ("body", "workers"), [*FACES, *(pytest.param(body, 2, marks=pytest.mark.long) for body in OF_TWO)]
)
def test_faces(body, workers):
    harness.run(on_both, body, workers=workers, env=SMALL)


@harness.on_ranks(workers=3, env=SMALL)
def test_broadcasts_between_cpu_and_device(bps: Any) -> None:
    """Tensors of some ranks are on a device, those of others on the CPU: broadcasts take both."""
    if bps.rank() != 1:
        simulated.install(immediate=True)
    for root in range(bps.size()):
        model = seeded(Plain, bps.rank())
        broadcast_parameters(model.named_parameters(), root_rank=root)
        on_device.same(on_device.kept(seeded(Plain, root)), on_device.kept(model), f"root {root}")


@harness.on_ranks(workers=2, env=SMALL)
def test_what_has_no_route_from_a_device_says_so(bps: Any) -> None:
    """What only takes CPU tensors says so, before anything is sent."""
    simulated.install(immediate=True)
    x = torch.ones(4)
    for call, arguments in {
        "prepare": ("push_pull", x),
        "forget": (x,),
    }.items():
        with pytest.raises(bps.InvalidTensorError, match=rf"{call}\(\) has no route for tensors on a device"):
            getattr(bps_torch, call)(*arguments)
    assert bps_torch.push_pull(x, average=False).tolist() == [bps.size()] * 4


@harness.on_ranks(workers=3, env=SMALL)
def test_what_goes_by_a_copy_of_the_whole(bps: Any) -> None:
    """Rank 0 has its tensors on the CPU."""
    if bps.rank():
        simulated.install(immediate=True)
    on_device.with_halves_and_weights(bps)
    x = torch.empty(3000)
    with pytest.raises(bps.InvalidTensorError, match="`out` is on meta"):
        bps_torch.accumulate(x, "w", out=torch.empty(3000, device="meta"))


@harness.on_ranks(workers=3, env=SMALL)
def test_exact_sums_go_by_a_copy_of_the_whole(bps: Any) -> None:
    """Rank 0 has its tensors on the CPU."""
    if bps.rank():
        simulated.install(immediate=True)
    total = bps_torch.ExactSum(torch.empty(30, 40), "t")
    for value in (1e20, 0.5, -1e20):
        total.add(torch.full((30, 40), value))
    assert torch.equal(total.push_pull(), torch.full((30, 40), 1.5))
    assert torch.equal(total.push_pull(average=True), torch.full((30, 40), 0.5))


# The first pieces of a tensor are compressed, and the last one travels as it is.
COMPRESSED = SMALL | {"BPS_COMPRESSION": "int4:feedback=1", "BPS_MIN_COMPRESS_BYTES": "1024", "BPS_TRANSPORT": "tcp"}


@harness.on_ranks(env=COMPRESSED, **harness.on_hosts("ab"))
def test_feedback_of_a_tensor_on_a_device(bps: Any) -> None:
    simulated.install(immediate=True)
    own = torch.linspace(-1, 1 + bps.rank(), 10 * 1024 + 50)
    bps_torch.push_pull(own, "g")
    state = bps_torch.feedback_state(own, "g")
    assert set(state) == {"residual", "servers", "saved_by"}
    for value in (state["residual"], state["servers"]):
        assert value.shape == own.shape
        assert value.any()
        assert not value[10 * 1024 :].any()
    following = bps_torch.push_pull(own, "g")
    bps_torch.load_feedback_state(own, "g", state)
    assert torch.equal(bps_torch.push_pull(own, "g"), following)
    bps_torch.load_feedback_state(own, "g", {})
    assert not torch.equal(bps_torch.push_pull(own, "g"), following)
    with pytest.raises(bps.InvalidArgumentError, match="of 2000 elements is not one of"):
        bps_torch.load_feedback_state(own, "g", {key: value[:2000] for key, value in state.items()})
    with pytest.raises(bps.InvalidArgumentError, match="compress"):
        bps_torch.feedback_state(own.to(torch.int64), "numbers")
    bps.barrier()  # the other rank may still declare that name


@harness.on_ranks(workers=2, env=SMALL)
def test_handles_can_be_awaited(bps: Any) -> None:
    """A staged handle can be awaited like one of the core's."""
    import asyncio

    simulated.install(delay=0.001, immediate=True)

    async def all_of() -> list[torch.Tensor]:
        handles = [bps_torch.push_pull_async(torch.full((3000,), 1.0), False, f"awaited {i}") for i in range(3)]
        return [await handle for handle in handles]

    for tensor in asyncio.run(all_of()):
        assert torch.equal(tensor, torch.full((3000,), float(bps.size())))


# ---- torch.distributed


@harness.on_ranks(workers=2, init=False, env=SMALL)
def test_the_hook_of_torchs_ddp(bps: Any) -> None:
    """torch's own DistributedDataParallel, with our hook, on another backend."""
    rank, size = int(os.environ["RANK"]), 2
    dist.init_process_group("gloo")
    bps_torch.init()

    def train() -> dict[str, torch.Tensor]:
        model = seeded(Plain)
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        ddp.register_comm_hook(None, bps_torch.ddp_comm_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(ddp(batch(step, *share(rank, size)))).backward()
            optimizer.step()
        return on_device.kept(model)

    on_cpu = train()
    device = simulated.install(delay=0.0001, immediate=True)
    on_device.same(on_cpu, train(), "")
    assert device.copies > 0
    dist.barrier()


def with_timeout(bps: Any) -> float:
    """A staged collective of the backend ends at the timeout of its group, not at BPS_TIMEOUT."""
    operation._GRACE = 30.0
    dist.init_process_group("bps")
    simulated.install(immediate=True)
    patient, group = (
        dist.new_group(
            backend="bps", timeout=timedelta(seconds=seconds),
            use_local_synchronization=True,
        )
        for seconds in (100, 2)
    )  # fmt: skip
    tensor = torch.ones(5000)
    dist.all_reduce(tensor, group=patient)
    assert torch.equal(tensor, torch.full((5000,), 2.0))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(bps.DeadlineError):
            dist.all_reduce(tensor, group=group)
    taken = time.monotonic() - begin
    dist.barrier()
    return taken


def test_staged_collectives_have_the_timeout_of_their_group():
    taken = harness.run(with_timeout, workers=2, init=False, env={**SMALL, "BPS_TIMEOUT": "60"})
    assert 1.5 < taken[0] < 20 * harness.PATIENCE


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
@harness.on_ranks("workers", init=False, env=SMALL)
def test_torchs_ddp_on_a_group_that_stages(bps: Any) -> None:
    """torch's own DistributedDataParallel on a group that stages, and what else that wrapper, FSDP and users call."""
    dist.init_process_group("bps")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = simulated.install(delay=0.0001, immediate=True)
    group = dist.new_group(backend="bps")
    on_device.torchs_own(group, rank, size)
    on_device.torchs_messages(group, rank, size)
    assert device.copies > 0, "nothing was staged"
    dist.barrier(group=group)

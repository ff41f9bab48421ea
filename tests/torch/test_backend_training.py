# SPDX-License-Identifier: Apache-2.0
"""What trains over torch.distributed trains over the backend bps, and learns what one process learns alone."""

from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bps_rdma.torch as bps_torch

pytestmark = pytest.mark.timeout(400)

STEPS, BATCH = 4, 12


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(net: Any, optimizer: Any, share: slice = slice(None)) -> None:
    for step in range(STEPS):
        net(batch(step)[share]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone() -> list[torch.Tensor]:
    net = model()
    train(net, torch.optim.Adam(net.parameters(), 0.01))
    return [parameter.detach() for parameter in net.parameters()]


def joined(backend: str) -> tuple[int, slice]:
    dist.init_process_group(backend)
    if backend == "gloo":
        bps_torch.init()
    rank, part = dist.get_rank(), BATCH // dist.get_world_size()
    return rank, slice(rank * part, (rank + 1) * part)


def check(parameters: Any) -> None:
    for parameter, expected in zip(parameters, alone(), strict=True):
        assert torch.allclose(parameter.detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "hooked"), [("bps", False), pytest.param("bps", True, marks=pytest.mark.long), ("gloo", True)]
)
@harness.on_ranks(workers=3, init=False)
def test_ddp(bps: Any, backend: str, hooked: bool) -> None:
    _, share = joined(backend)
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0005)  # several buckets
    if hooked:
        net.register_comm_hook(None, bps_torch.ddp_comm_hook)
    before = bps.metrics()["total"]["operations"]
    train(net, torch.optim.Adam(net.parameters(), 0.01), share)
    assert bps.metrics()["total"]["operations"] - before >= 2 * STEPS
    check(net.parameters())


@harness.on_ranks(workers=3, init=False)
def test_the_hook_takes_a_group_and_needs_a_job(bps: Any) -> None:
    rank, _ = joined("gloo")
    group = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    net = nn.parallel.DistributedDataParallel(model(), process_group=group)
    net.register_comm_hook(group, bps_torch.ddp_comm_hook)
    share = [slice(0, 6), slice(6, 12), slice(None)][rank]
    train(net, torch.optim.Adam(net.parameters(), 0.01), share)
    check(net.parameters())
    bps.shutdown()
    with pytest.raises(RuntimeError, match="initiali"):  # a hook without a job
        net(batch(0)).sum().backward()


class Sparse(nn.Module):
    """Has a sparse gradient, a complex one, and others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(12, 4, sparse=True)
        self.factor = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.out = nn.Linear(4, 256)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.out(torch.view_as_real(self.factor * self.words(numbers)).sum(-1))


def with_states(_: Any, compresses: bool) -> list[torch.Tensor]:
    _, share = joined("gloo")
    net = nn.parallel.DistributedDataParallel(Sparse(), find_unused_parameters=False)
    compression = bps_torch.Int8(everywhere=True) if compresses else None
    net.register_comm_hook(bps_torch.HookState(compression=compression), bps_torch.ddp_comm_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        numbers = torch.randint(0, 12, (BATCH,), generator=torch.Generator().manual_seed(step))
        net(numbers[share]).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def test_the_hook_takes_sparse_and_complex_gradients_and_compresses_the_others():
    alone = Sparse()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        alone(torch.randint(0, 12, (BATCH,), generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        optimizer.step()
    expected = [parameter.detach() for parameter in alone.parameters()]
    for compresses in (False, True):
        for found in harness.run(with_states, compresses, workers=2, init=False, env={"BPS_MIN_COMPRESS_BYTES": "0"}):
            difference = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
            assert difference < (1e-2 if compresses else 1e-6)
            assert (difference > 1e-5) == compresses


@harness.on_ranks(workers=2, init=False)
def test_the_hook_takes_sparse_gradients_without_a_state(bps: Any) -> None:
    rank, _ = joined("gloo")
    net = nn.parallel.DistributedDataParallel(nn.Embedding(3, 1, sparse=True))
    net.register_comm_hook(None, bps_torch.ddp_comm_hook)
    for _step in range(3):
        net.zero_grad()
        net(torch.tensor([rank, 2])).sum().backward()
    dist.barrier()
    assert net.module.weight.grad.to_dense().flatten().tolist() == [0.5, 0.5, 1]


def exact_states(_: Any, is_sparse: bool, has_state: bool) -> None:
    joined("gloo")
    net = Sparse()
    net.words.sparse = is_sparse
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-9)
    ddp.register_comm_hook(bps_torch.HookState(exact=True) if has_state else None, bps_torch.ddp_comm_hook)
    kind = "(sparse|complex)" if is_sparse else "complex"
    with pytest.raises(RuntimeError, match=rf"gradients of bucket \d are {kind}, and means of these cannot be exact"):
        ddp(torch.arange(12)).pow(2).mean().backward()
    dist.barrier()  # the other one may still wait for an earlier bucket


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_hook_refuses_exact_means_of_sparse_and_complex_gradients(is_sparse: bool, has_state: bool) -> None:
    env = {} if has_state else {"BPS_EXACT": "1"}
    harness.run(exact_states, is_sparse, has_state, workers=2, init=False, env=env)


def with_fsdp(_: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.utils import clip_grad_norm_

    _, share = joined("bps")
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.Adam(net.parameters(), 0.01), share)
    check([parameter.full_tensor() for parameter in net.parameters()])
    net(batch(0)[share]).sum().backward()
    assert clip_grad_norm_(net.parameters(), 0.1).full_tensor().item() > 0


def with_zero(_: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, share = joined("bps")
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    train(net, optimizer, share)
    check(net.parameters())
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    dist.barrier()


@pytest.mark.parametrize("body", [with_fsdp, with_zero])
def test_sharded_training(body):
    harness.run(body, workers=2, init=False)


@harness.on_ranks(workers=4, init=False)
def test_dtensor_and_checkpoints(bps: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    joined("bps")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(48.0).view(6, 8)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert tensor.to_local().shape == (3, 4)
    assert torch.equal(tensor.full_tensor(), whole)
    assert torch.equal(tensor.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), whole)
    assert float((tensor * 2).sum().full_tensor()) == 2 * float(whole.sum())
    product = tensor @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
    assert torch.equal(product.full_tensor(), whole @ whole.t())

    checkpoint.save({"tensor": tensor, "number": 3}, checkpoint_id=tmp_path / "checkpoint")
    state = {"tensor": distribute_tensor(torch.zeros(6, 8), mesh, [Replicate(), Shard(0)]), "number": 0}
    checkpoint.load(state, checkpoint_id=tmp_path / "checkpoint")  # under another placement
    assert torch.equal(state["tensor"].full_tensor(), whole)
    assert state["number"] == 3


def with_torchs_hook(bps: Any, backend: str, name: str) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    _, share = joined(backend)
    net = nn.parallel.DistributedDataParallel(model().float())
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name:
        net.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for step in range(8):
        net(batch(step).float()[share]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("name", [pytest.param("fp16", marks=pytest.mark.long), "powerSGD"])
def test_torchs_own_compression_hooks(name: str) -> None:
    ours = harness.run(with_torchs_hook, "bps", name, workers=2, init=False)
    plain = harness.run(with_torchs_hook, "bps", "", workers=2, init=False)
    for one, other, exact in zip(ours[0], ours[1], plain[0], strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, exact), "nothing was compressed"
        torch.testing.assert_close(one, exact, rtol=0.05, atol=0.005 if name == "fp16" else 0.05)


@harness.on_ranks(workers=2, init=False)
def test_an_optimizer_of_what_torchs_ddp_averages_is_refused(bps: Any) -> None:
    dist.init_process_group("bps")
    model = nn.Linear(8, 4)
    wrapped = nn.parallel.DistributedDataParallel(model)
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for wrap in (
        lambda: bps_torch.DistributedOptimizer(sgd, model.named_parameters()),
        lambda: bps_torch.CrossBarrier(model, sgd),
    ):
        with pytest.raises(
            bps_torch.InvalidArgumentError, match=r"averages the gradients of 'weight' already.*not both"
        ):
            wrap()
    wrapped.itself = [wrapped]  # only the garbage collector frees it
    del wrapped
    bps_torch.DistributedOptimizer(sgd, model.named_parameters())

# SPDX-License-Identifier: Apache-2.0
"""Training on a device by every face of bps_rdma.torch."""

import random
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from training import Branching, Exact, Images, Plain, batch, loss_of, seeded, share

import bps_rdma.torch as bps_torch
from bps_rdma.torch import (
    BFloat16,
    CrossBarrier,
    DiLoCo,
    DistributedDataParallel,
    DistributedOptimizer,
    Float16,
    Int8,
    ShardedOptimizer,
    TrainingState,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

Results = dict[str, Any]


class AnyOrder(nn.Module):
    """Uses its layers in the order that it is told, so that gradients become ready in the reverse of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.wide = nn.Parameter(torch.full((3000,), 0.5))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x * self.wide[:8]


def any_order(seed: int) -> list[int]:
    return random.Random(seed).sample(range(8), 8)


def same(here: Any, there: Any, where: str) -> None:
    if isinstance(here, torch.Tensor):
        assert torch.equal(here, there), where
    elif isinstance(here, dict):
        assert here.keys() == there.keys(), where
        for key in here:
            same(here[key], there[key], f"{where}.{key}")
    elif isinstance(here, (list, tuple)):
        assert len(here) == len(there), where
        for number, pair in enumerate(zip(here, there, strict=True)):
            same(*pair, f"{where}.{number}")
    else:
        assert here == there, where


def kept(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def with_ddp(bps: Any, strategy: str) -> Results:
    rank, size = bps.rank(), bps.size()
    found: Results = {}
    for make in (Plain, Images, Exact, Branching, AnyOrder):
        for compression in (None, BFloat16(everywhere=True)):
            model = seeded(make, rank)
            ddp = DistributedDataParallel(
                model, strategy=strategy, bucket_mb=0.001, compression=compression, find_unused_parameters=True
            )
            rate = 2.0**-10 if make is Exact else 0.05
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
            for step in range(4):
                order = any_order(10 * step + rank)
                more = {Branching: [rank % 2], AnyOrder: [order]}.get(make, [])
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                if step == 2:  # two passes, of which the second synchronises
                    with ddp.no_sync():
                        loss_of(ddp(batch(9, *share(rank, size)), *more)).backward()
                loss_of(ddp(batch(step, *share(rank, size)), *more)).backward()
                optimizer.step()
            found[f"{make.__name__} {compression}"] = kept(model)
    return found


def with_optimizers(bps: Any) -> Results:
    rank, size = bps.rank(), bps.size()
    found: Results = {}
    for strategy in ("naive", "flat", "overlap", "bucketed", "cross barrier"):
        for compression in (None, Float16(everywhere=True)):
            model = seeded(AnyOrder, rank)
            broadcast_parameters(model.state_dict(), prefix=strategy)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            if strategy == "cross barrier":
                optimizer = CrossBarrier(model, optimizer, compression=compression)
            else:
                optimizer = DistributedOptimizer(
                    optimizer, model.named_parameters(), compression, 2, strategy=strategy, bucket_mb=0.001
                )
            for step in range(4):
                order = any_order(10 * step + rank)
                optimizer.zero_grad()
                for half in range(1 if strategy == "cross barrier" else 2):
                    loss_of(model(batch(step + 10 * half, *share(rank, size)), order)).backward()
                optimizer.step()
            optimizer.synchronize()
            found[f"{strategy} {compression}"] = kept(model), optimizer.state_dict()["state"]
    return found


def asynchronously(bps: Any) -> Results:
    """For jobs with BPS_ASYNC=1 in which results do not depend on who comes first."""
    rank, size = bps.rank(), bps.size()
    model = seeded(Plain, rank)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model(batch(step, *share(rank, size)))).backward()
        optimizer.step()
    optimizer.unstore_weights()
    return {"model": kept(model), "state": optimizer.state_dict()["state"]}


def with_closure(bps: Any) -> Results:
    model = seeded(Plain)
    optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), model.named_parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch(0, *share(bps.rank(), bps.size()))))
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    return {"model": kept(model), "losses": losses}


def with_shards(bps: Any, models: tuple[type[nn.Module], ...] = (Plain, Images, AnyOrder)) -> Results:
    found: Results = {}
    for make in models:
        model = seeded(make, bps.rank())
        ddp = DistributedDataParallel(model)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            more = [list(range(8))] if make is AnyOrder else []
            loss_of(ddp(batch(step, *share(bps.rank(), bps.size())), *more)).backward()
            optimizer.step()
        found[make.__name__] = kept(model), optimizer.state_dict(), optimizer.state_dict(root=1)
    return found


def with_diloco(bps: Any) -> Results:
    """Two fragments, whose compressed means travel while the ranks go on."""
    rank, size = bps.rank(), bps.size()
    model = seeded(Plain, rank)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    how = Int8(feedback=True, everywhere=True)
    optimizer = DiLoCo(inner, model.named_parameters(), every=3, fragments=2, delay=1, mix=0.5, compression=how)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model(batch(step, *share(rank, size)))).backward()
        optimizer.step()
    optimizer.synchronize()
    return {"model": kept(model), "inner": inner.state_dict()["state"]}


def with_adapters(bps: Any) -> Results:
    """Most parameters are frozen, as beside those of LoRA, and TrainingState gives all ranks the state of rank 0."""
    rank, size = bps.rank(), bps.size()
    bare = seeded(AnyOrder, rank)
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_("layers.3" in name)
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.01)
    state = TrainingState(model, optimizer, step=rank)
    for _ in range(3):
        state.sync()
        optimizer.zero_grad()
        loss_of(model(batch(state.step, *share(rank, size)), any_order(state.step))).backward()
        optimizer.step()
        state.step += 1
    return {"model": kept(bare), "state": optimizer.state_dict()["state"], "step": state.step}


def with_broadcasts(bps: Any) -> Results:
    rank = bps.rank()
    torch.manual_seed(rank)
    with torch.device("cpu"):  # the same values for every device
        made: Results = {
            "large": torch.randn(5000),
            "strided": torch.randn(40, 30).t(),
            "int16": torch.full((7, 3), rank, dtype=torch.int16),
            "complex": torch.randn(33, dtype=torch.complex64),
            "conjugated": torch.randn(33, dtype=torch.complex64).conj(),
            "bool": torch.rand(9) < 0.5,
            "none": torch.empty(0),
            "scalar": torch.tensor(float(rank)),
        }
    tensors = {name: value.to(torch.get_default_device()) for name, value in made.items()}
    broadcast_parameters(tensors, root_rank=1)
    model = seeded(Plain, rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 1:
        loss_of(model(batch(0))).backward()
        optimizer.step()
    broadcast_optimizer_state(optimizer, root_rank=1)
    thing = broadcast_object({"rank": rank, "tensor": torch.full((3000,), float(rank))}, root_rank=1)
    assert thing["rank"] == 1
    return {"tensors": tensors, "state": optimizer.state_dict(), "object": thing}


def with_push_pull(bps: Any) -> Results:
    rank, size = bps.rank(), bps.size()
    found: Results = {}
    bps_torch.declare("declared", torch.empty(5000))
    for average in (True, False):
        for compression in (None, bps_torch.BFloat16(everywhere=True)):
            x = torch.linspace(0, rank + 1, 5000, requires_grad=True)
            name = "compressed" if compression else "declared"
            y = bps_torch.push_pull(x, average, name, compression=compression)
            (y * (rank + 1)).sum().backward()
            found[f"{average} {compression}"] = y.detach().clone(), x.grad
    z = torch.full((3000,), float(rank))
    out = bps_torch.push_pull_async(z, name="out of place")
    into = bps_torch.push_pull_async_inplace(z.clone(), name="in place", priority=3)
    harness.eventually(lambda: bps_torch.poll(out))
    found["async"] = bps_torch.synchronize(out), bps_torch.synchronize(into)
    assert torch.equal(z, torch.full((3000,), float(rank))), "the input stays"
    assert torch.equal(found["async"][0], torch.full((3000,), (size - 1) / 2))
    inside = torch.ones(10, dtype=torch.int64)
    assert bps_torch.push_pull_inplace(inside, average=False) is inside
    bps_torch.byteps_torch_set_num_grads(3)
    group = [torch.full((n,), float(rank + n)) for n in (1, 2000, 17)]
    for number, tensor in enumerate(group):
        bps_torch.push_pull_group_sync_inplace(tensor, name=f"grouped {number}")
    found["rest"] = inside, group
    return found


def with_collectives(bps: Any) -> Results:
    """reduce_scatter, all_gather, broadcast, and all options of all forms of push_pull."""
    rank, size = bps.rank(), bps.size()
    found: Results = {}
    own = torch.linspace(-1, 1, 1500 * size) * (rank + 1)
    for how in ({"op": "max"}, {"op": "product"}, {"exact": True}, {"compression": bps_torch.Int8(everywhere=True)}):
        text = str(how)
        found[f"{text} forms"] = [
            bps_torch.push_pull(own, text, **how),
            bps_torch.push_pull_inplace(own.clone(), text, **how),
            bps_torch.push_pull_async(own, text, **how).wait(),
            bps_torch.push_pull_async_inplace(own.clone(), text, **how).wait(),
        ]
        if "compression" in how:  # chunks have scales of their own
            del found[f"{text} forms"]
            continue
        part = bps_torch.reduce_scatter(own, f"{text} part", **how)
        out = torch.empty_like(part)
        assert bps_torch.reduce_scatter_async(own, f"{text} part", out=out, **how).wait() is out
        found[f"{text} parts"] = part, out, bps_torch.all_gather(part)
    for dtype in (torch.float32, torch.bool, torch.complex64):
        whole = bps_torch.all_gather(own[:700].view(7, 100).to(dtype), f"gathered {dtype}")
        out = torch.empty_like(whole)
        assert bps_torch.all_gather_async(own[:700].view(7, 100).to(dtype), out=out).wait() is out
        copied = own.to(dtype)
        assert bps_torch.broadcast(copied, f"copied {dtype}", root=size - 1) is copied
        again = own.to(dtype)
        assert bps_torch.broadcast_async(again, root=0).wait() is again
        found[str(dtype)] = whole, out, copied, again
    parameter = torch.nn.Parameter(own.clone())
    assert bps_torch.push_pull_async_inplace(parameter, "parameter").wait() is parameter
    found["parameter"] = parameter.detach().clone()
    return found


def with_halves_and_weights(bps: Any) -> None:
    """push, pull, and weights that servers keep; for three ranks, whose tensors may lie in different places."""
    rank, size = bps.rank(), bps.size()
    x = torch.full((3000,), float(rank))
    bps_torch.push(x, "p", average=False)
    assert bps_torch.pull(x, "p", average=False) is x
    assert x.eq(sum(range(size))).all()
    x.fill_(rank + 5)
    assert bps_torch.store(x, "w", root=1) is x
    assert x.eq(6).all()
    added = torch.ones(3000)
    for step in range(2):
        if rank == step + 1:
            found = bps_torch.accumulate(added, "w")
            assert found.device == added.device
            assert found.eq(7 + step).all()
        bps.barrier()
    out = torch.empty(3000)
    handle = bps_torch.accumulate_async(added.mul_(2) if rank == 2 else added.zero_(), "w", out=out)
    assert handle.wait() is out
    if rank == 2:
        found = bps_torch.accumulate_async(added.zero_(), "w").wait()
        assert found.device == added.device
        assert found.eq(10).all()
    bps.barrier()
    assert bps_torch.unstore(x, "w") is x
    assert x.eq(10).all()


def torchs_own(group: Any, rank: int, size: int) -> None:
    model, alone = seeded(Exact), seeded(Exact)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    for one in (alone, ddp):
        optimizer = torch.optim.SGD(one.parameters(), lr=2.0**-10)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(one(batch(step) if one is alone else batch(step, *share(rank, size)))).backward()
            optimizer.step()
    same(kept(alone), kept(model), "")
    tensor = torch.full((3000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(sum(range(1, size + 1))).all()
    tensor.fill_(rank)
    dist.broadcast(tensor, 1, group=group)
    assert tensor.eq(1).all()
    dist.reduce(tensor, 0, group=group)
    assert tensor.eq(size if rank == 0 else 1).all()
    for sizes in ([700] * size, [100 * (number + 1) for number in range(size)]):
        parts = [torch.empty(count) for count in sizes]
        dist.all_gather(parts, torch.full((sizes[rank],), float(rank)), group=group)
        assert all(part.eq(number).all() for number, part in enumerate(parts))
        part = torch.empty(sizes[rank])
        dist.reduce_scatter(part, [torch.full((count,), float(rank)) for count in sizes], group=group)
        assert part.eq(sum(range(size))).all()
    whole = torch.empty(size * 1000)
    dist.all_gather_into_tensor(whole, torch.full((1000,), float(rank)), group=group)
    assert whole.view(size, -1)[:, 0].tolist() == list(range(size))


def torchs_messages(group: Any, rank: int, size: int) -> None:
    """Sends and receives in all of torch's ways, by copies in CPU memory."""
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3000)
    requests = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((3000,), float(rank)), after, group),
        dist.P2POp(dist.irecv, got, before, group),
    ])  # fmt: skip
    for request in requests:
        request.wait()
    assert got.eq(before).all()
    columns = torch.zeros(40, 30).t()  # does not lie in one piece
    if rank == 0:
        found = [(dist.recv(columns, group=group, tag=3), columns[0, 0].item()) for _ in range(size - 1)]
        assert sorted(found) == [(source, float(source)) for source in range(1, size)]
        assert columns.eq(found[-1][0]).all()
    else:
        dist.send(columns.add(rank), 0, group=group, tag=3)
    inputs = [torch.full((number + 1,), float(rank)) for number in range(size)]
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, inputs, group=group)
    assert all(out.eq(number).all() for number, out in enumerate(outputs))
    counts = [number + 1 for number in range(size)]
    whole = torch.empty((rank + 1) * size)
    dist.all_to_all_single(whole, torch.cat(inputs), [rank + 1] * size, counts, group=group)
    assert torch.equal(whole, torch.cat(outputs))
    gathered = [torch.empty(700) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.full((700,), float(rank)), gathered, dst=1, group=group)
    assert gathered is None or all(part.eq(number).all() for number, part in enumerate(gathered))
    piece = torch.empty(700)
    parts = [torch.full((700,), float(number)) for number in range(size)] if rank == 0 else None
    dist.scatter(piece, parts, src=0, group=group)
    assert piece.eq(rank).all()

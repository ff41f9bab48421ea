# SPDX-License-Identifier: Apache-2.0
"""The operations of bps_rdma on torch tensors: what is compared is what numpy or torch say of the same numbers."""

import functools
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import await_mark, mark
from reference.values import pushed, summed

import bps_rdma.torch as bps_torch

TCP = {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "64"}


def contribution(rank: int, count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("workers", [1, 3])
@harness.on_ranks("workers")
def test_every_form_has_every_reduction(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    everybody = torch.stack([torch.arange(6) + other for other in range(size)])
    expected = {
        "sum": everybody.sum(0),
        "average": everybody.sum(0) // size,
        "min": everybody.min(0).values,
        "max": everybody.max(0).values,
        "product": everybody.prod(0),
    }
    for op, right in expected.items():
        own = everybody[rank].clone()
        assert torch.equal(bps_torch.push_pull(own, f"a {op}", op=op), right), op
        assert torch.equal(bps_torch.push_pull_async(own, f"a {op}", op=op).wait(), right), op
        assert torch.equal(own, everybody[rank])
        assert bps_torch.push_pull_inplace(own, f"a {op}", op=op) is own
        assert torch.equal(own, right), op
        own = everybody[rank].clone()
        handle = bps_torch.push_pull_async_inplace(own, f"a {op}", op=op)
        assert bps_torch.synchronize(handle) is own
        assert torch.equal(own, right), op
        begin, end = bps_torch.shard_bounds(6, size, rank)
        assert torch.equal(bps_torch.reduce_scatter(everybody[rank], f"s {op}", op=op), right[begin:end]), op
        part = torch.empty(end - begin, dtype=torch.int64)
        assert bps_torch.reduce_scatter_async(everybody[rank], f"s {op}", op=op, out=part).wait() is part
        assert torch.equal(part, right[begin:end]), op
        bps_torch.push(everybody[rank], f"h {op}", op=op)
        assert torch.equal(bps_torch.pull(torch.empty(6, dtype=torch.int64), f"h {op}", op=op), right), op
    with pytest.raises(bps.InvalidArgumentError, match="no gradient flows through op='max'"):
        bps_torch.push_pull(torch.ones(2, requires_grad=True), op="max")
    with torch.no_grad():
        assert bps_torch.push_pull(torch.ones(2, requires_grad=True), "constant", op="max").tolist() == [1, 1]


@harness.on_ranks(workers=2, env=TCP)
def test_every_form_can_be_compressed_or_exact(bps: Any) -> None:
    """Compressed and exact sums are the same in all forms, bit for bit."""
    rank, size = bps.rank(), bps.size()
    own = contribution(rank, 4096)
    everybody = torch.stack([contribution(other, 4096) for other in range(size)])
    for how in ({"compression": bps_torch.Int8()}, {"compression": bps_torch.Compression.bf16}, {"exact": True}):
        name = str(how)
        first = bps_torch.push_pull(own, name, **how)
        assert torch.allclose(first, everybody.mean(0), atol=0.05)
        if "exact" in how:
            assert torch.equal(first, everybody.double().mean(0).float())
        else:
            assert not torch.equal(first, everybody.mean(0))
        forms = [
            bps_torch.push_pull_inplace(own.clone(), name, **how),
            bps_torch.push_pull_async(own, name, **how).wait(),
            bps_torch.push_pull_async_inplace(own.clone(), name, **how).wait(),
            bps_torch.prepare("push_pull", own.clone(), name, **how)(),
        ]
        if "exact" in how:  # parts lie on other servers, and what a rank gives its own server is not encoded
            forms.append(bps_torch.all_gather(bps_torch.reduce_scatter(own, f"{name} part", **how)))
        for number, found in enumerate(forms):
            assert torch.equal(found, first), (how, number)
    with pytest.raises(bps.InvalidArgumentError, match="not exact"):
        bps_torch.push_pull_inplace(own, compression=bps_torch.Int8(), exact=True)


@harness.on_ranks(workers=3)
def test_tensors_of_every_dtype(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for name in ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64", "bool"):
        dtype = getattr(torch, name)
        as_numpy = "float32" if name == "bfloat16" else name
        values = pushed(1001, as_numpy, rank)
        expected = torch.from_numpy(summed(1001, as_numpy, range(size))).to(dtype)
        tensor = torch.from_numpy(values).to(dtype, copy=True)
        before, address = tensor.clone(), tensor.data_ptr()
        result = bps.push_pull(tensor, average=False, name=name)
        assert isinstance(result, torch.Tensor)
        assert result.dtype is dtype
        assert torch.equal(result, expected), name
        assert torch.equal(tensor, before)
        assert bps.push_pull_inplace(tensor, average=False, name=name) is tensor
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, expected), name

    # bfloat16 holds 256 and 258 but not 257: pairwise sums would stay at 256.
    mine = torch.tensor([256.0] if rank == 0 else [1.0], dtype=torch.bfloat16)
    assert bps.push_pull(mine, average=False, name="wide").item() == 258.0
    random = [torch.randn(999, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(size)]
    exact = sum((one.float() for one in random[1:]), random[0].float())
    mean = bps.push_pull(random[rank], average=True, name="mean")
    assert torch.equal(mean, (exact / torch.tensor(float(size))).to(torch.bfloat16))

    # A gradient, and a view that is contiguous.
    parameter = torch.nn.Parameter(torch.zeros(4, 5))
    (parameter * (rank + 1)).sum().backward()
    bps.push_pull_inplace(parameter.grad, average=False, name="grad")
    assert torch.equal(parameter.grad, torch.full((4, 5), 6.0))
    flat = torch.full((10,), float(rank))
    bps.push_pull_inplace(flat[5:], average=False, name="view")
    assert flat.tolist() == [float(rank)] * 5 + [3.0] * 5


@harness.on_ranks(workers=3)
def test_numbers_that_are_only_moved(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.int16):
        part = torch.arange(6).view(2, 3).to(dtype) + torch.tensor(rank).to(dtype)
        whole = torch.cat([torch.arange(6).view(2, 3).to(dtype) + torch.tensor(r).to(dtype) for r in range(size)])
        found = bps_torch.all_gather(part)
        assert found.dtype == dtype
        assert torch.equal(found, whole)
        out = torch.empty_like(whole)
        assert bps_torch.all_gather_async(part, f"{dtype}", out=out).wait() is out
        assert torch.equal(out, whole)
        assert bps_torch.broadcast(part, root=size - 1) is part
        assert torch.equal(part, whole[-2:])
        part = part + torch.tensor(rank).to(dtype)
        handle = bps_torch.broadcast_async(part, f"b {dtype}", root=0)
        assert bps_torch.wait([handle])[0] is part
        assert torch.equal(part, whole[-2:])
    scalar = bps_torch.all_gather(torch.tensor(float(rank)))
    assert scalar.tolist() == list(range(size))
    uneven = torch.empty(size + 1, dtype=torch.float32)
    begin, end = bps_torch.shard_bounds(size + 1, size, rank)
    bps_torch.all_gather(torch.arange(begin, end).float(), out=uneven)
    assert uneven.tolist() == list(range(size + 1))
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    assert bps_torch.broadcast(parameter, "parameter", root=1) is parameter
    assert parameter.tolist() == [1, 1, 1]
    with pytest.raises(bps.InvalidArgumentError, match="root=9"):
        bps_torch.broadcast(parameter, root=9)
    with pytest.raises(bps.InvalidTensorError, match="resolve_conj"):
        bps_torch.all_gather(torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(bps.InvalidTensorError, match="out"):
        bps_torch.all_gather(torch.ones(3), out=torch.ones(3, device="meta"))
    with pytest.raises(bps.InvalidTensorError, match="part"):
        bps_torch.reduce_scatter(torch.ones(3), out=torch.ones(7))


@harness.on_ranks(workers=3)
def test_groups_of_either_kind(bps: Any) -> None:
    """Of either kind, in every call."""
    rank = bps.rank()
    dist.init_process_group("gloo")
    theirs = dist.new_group([1, 2])
    if rank > 0:
        for group in (theirs, bps_torch.new_group([1, 2])):
            tensor = torch.full((4,), float(rank))
            assert bps_torch.push_pull(tensor, average=False, group=group).tolist() == [3] * 4
            assert bps_torch.push_pull_async_inplace(tensor.clone(), op="max", group=group).wait().tolist() == [2] * 4
            assert bps_torch.reduce_scatter(tensor, op="sum", group=group).tolist() == [3, 3]
            assert bps_torch.all_gather(tensor[:1], group=group).tolist() == [1, 2]
            assert bps_torch.broadcast(tensor.clone(), root=2, group=group).tolist() == [2] * 4
            bps_torch.declare_many({"d": tensor, "e": ((2, 2), torch.float16)}, group=group)
            assert bps_torch.push_pull(tensor, "d", group=group).tolist() == [1.5] * 4
            total = bps_torch.ExactSum(tensor, group=group)
            total.add(tensor)
            assert total.push_pull().tolist() == [3] * 4
            prepared = bps_torch.prepare("push_pull", tensor.clone(), "p", op="sum", group=group)
            assert prepared().tolist() == [3] * 4
            bps_torch.barrier(group)
            bps_torch.commit(group=group)
    with pytest.raises(bps.InvalidArgumentError, match="3 is not a group"):
        bps_torch.barrier(group=3)
    dist.barrier()


@harness.on_ranks(workers=2, env=TCP)
def test_what_is_kept(bps: Any) -> None:
    """Weights that servers keep, what compression remembers, and memory that other processes map."""
    rank = bps.rank()
    weights = bps_torch.empty((2, 3), torch.float64)
    assert (weights.dtype, weights.tolist()) == (torch.float64, [[0.0] * 3] * 2)
    weights += rank + 1
    assert bps_torch.store(weights, "w", root=1) is weights
    assert weights.tolist() == [[2.0] * 3] * 2
    bps_torch.barrier()
    one = torch.ones(2, 3, dtype=torch.float64)
    assert bps_torch.accumulate(one, "w").dtype == torch.float64
    bps_torch.barrier()
    assert bps_torch.accumulate_async(torch.zeros_like(one), "w").wait().tolist() == [[4.0] * 3] * 2
    bps_torch.barrier()
    assert bps_torch.unstore(weights, "w").tolist() == [[4.0] * 3] * 2
    with pytest.raises(bps.InvalidArgumentError, match="names nothing"):
        bps_torch.store(weights, "")

    own = contribution(rank)
    bps_torch.push_pull(own, "g", compression=bps_torch.Int4(feedback=True, everywhere=True))
    state = bps_torch.feedback_state(own, "g")
    assert set(state) == {"residual", "servers", "saved_by"}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    following = bps_torch.push_pull(own, "g")
    bps_torch.load_feedback_state(own, "g", state)
    assert torch.equal(bps_torch.push_pull(own, "g"), following)
    bps_torch.forget(own)
    assert bps_torch.metrics()["total"]["compressed_bytes"] > 0
    assert bps_torch.empty(0).shape == (0,)
    assert bps_torch.empty((), "bool").dtype == torch.bool


def late(bps: Any) -> list[str]:
    """One rank never comes: every call has a deadline of its own, and the job goes on."""
    tensor = torch.ones(8)
    calls = {
        "push_pull_inplace": lambda name: bps_torch.push_pull_inplace(tensor, name, timeout=0.5),
        "push_pull_async": lambda name: bps_torch.push_pull_async(tensor, name, timeout=0.5).wait(),
        "reduce_scatter": lambda name: bps_torch.reduce_scatter(tensor, name, timeout=0.5),
        "all_gather": lambda name: bps_torch.all_gather(tensor, name, timeout=0.5),
        "broadcast": lambda name: bps_torch.broadcast(tensor, name, root=1, timeout=0.5),
        "pull": lambda name: (bps_torch.push(tensor, name, timeout=0.5), bps_torch.pull(tensor, name, timeout=0.5)),
    }
    told = []
    if bps.rank() == 0:
        for name, call in calls.items():
            with pytest.raises(bps_torch.DeadlineError) as caught:
                call(name)
            told.append(f"{name}: {caught.value}")
    bps_torch.barrier()
    assert bps_torch.push_pull(tensor, "after", average=False).tolist() == [2] * 8
    return told


def test_every_call_has_a_deadline_of_its_own() -> None:
    told, _ = harness.run(late, workers=2)
    assert len(told) == 6
    for one in told:
        assert "byteps." in one
        assert "rank 1" in one, one


@harness.on_ranks(workers=2)
def test_calls_from_several_threads(bps: Any) -> None:
    """Several threads, each with tensors and names of its own. Handles that are dropped change nothing for others."""
    rank, size = bps.rank(), bps.size()

    def run(number: int) -> None:
        for step in range(20):
            own = torch.full((500,), float(rank + number + step))
            bps_torch.push_pull_async_inplace(torch.ones(300), f"dropped {number}", average=False)
            bps_torch.all_gather_async(torch.ones(300), f"dropped too {number}")
            found = bps_torch.push_pull(own, f"kept {number}", average=False)
            expected = float(sum(range(size)) + size * (number + step))
            assert torch.equal(found, torch.full((500,), expected)), (number, step, found[0])

    harness.in_threads(*(functools.partial(run, number) for number in range(4)))


@pytest.mark.parametrize("call", ["reduce_scatter", "all_gather", "broadcast"])
@harness.on_ranks(workers=2, kills="rank 1", at="waits")
def test_a_lost_rank_ends_every_operation(bps: Any, call: str) -> None:
    mark("waits")
    if bps.rank() == 1:
        await_mark("never")
    with pytest.raises(bps_torch.PeerLostError, match="1"):
        getattr(bps_torch, call)(torch.ones(100), "x")


@harness.on_ranks(workers=2)
def test_a_prepared_tensor_whose_memory_has_moved_is_refused(bps: Any) -> None:
    def resize(tensor: torch.Tensor) -> None:
        tensor.resize_(1_000_000)

    def replace(tensor: torch.Tensor) -> None:
        tensor.data = torch.ones(5000)

    def release(tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    for number, move in enumerate((resize, replace, release)):
        tensor = torch.ones(5000)
        prepared = bps_torch.prepare("push_pull", tensor, f"moved {number}", op="sum")
        prepared()
        assert tensor[-1] == 2
        move(tensor)
        with pytest.raises(bps.InvalidArgumentError, match=f"'byteps.moved {number}'.*(other memory|was freed)"):
            prepared()

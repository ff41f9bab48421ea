# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter, all_gather and broadcast that the GPUs of a host begin or end among themselves (BPS_GPU_HOST_SUM).

As in test_host_sums.py, the device is simulated, with gloo in the place of NCCL.
"""

import threading
from typing import Any

import gpu_arrays
import harness
import pytest
import simulated
import torch
from host_jobs import ON, TCP, on, values

from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.torch import transfer
from bps_rdma.torch.transfer.hosts import collectives, watch
from bps_rdma.torch.transfer.hosts.queue import HostOperation

# ---- Values


class Late:
    """What reads a tensor before the device has filled it, reads zeros, and what reads a result too early, as well."""

    def __init__(self, bps: Any) -> None:
        self.bps, self.device = bps, simulated.install(delay=0.0002)
        self.pending: list[tuple[Any, torch.Tensor, torch.Tensor, str]] = []
        self.computed = threading.Event()
        self.device.compute.put(self.computed.wait)

    def fill(self, tensor: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        self.device.compute.put(lambda: tensor.copy_(filled))
        return tensor

    def later(self, handle: Any, result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        self.pending.append((handle, result, expected, what))

    def check(self) -> None:
        for _ in range(5):
            self.bps.barrier()  # what does not wait for the device has time to read zeros
        self.computed.set()
        for handle, result, expected, what in self.pending:
            assert handle.wait() is result, what
            self.device.wait(self.device.record(self.device.compute))
            assert torch.equal(result, expected), what


@pytest.mark.parametrize("layout", ["aabb", "abba", "aab", "aaabbb", "aa"])
def test_values(layout):
    harness.run(operations_of_all_kinds, **on(layout, **TCP))


def operations_of_all_kinds(bps: Any) -> None:
    """Sizes around pieces, all dtypes and reductions, in and out of place, one kind after the other."""
    late = Late(bps)
    for column in (1, 7, 1024, 3001):
        scattered(late, column, torch.float32, ReduceOp.sum)
        gathered(late, column, torch.float32)
        copied(late, column, torch.float32, column % bps.size())
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        scattered(late, 515, dtype, ReduceOp.sum)
    for op in (ReduceOp.average, ReduceOp.min, ReduceOp.max, ReduceOp.product):
        scattered(late, 514, torch.float32, op)
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.bfloat16):
        gathered(late, 513, dtype)
    for root in range(bps.size()):
        copied(late, 1999, torch.int16, root)
    late.check()


def scattered(late: Late, column: int, dtype: torch.dtype, op: ReduceOp) -> None:
    rank, size = late.bps.rank(), late.bps.size()
    every = torch.stack([values(each, column * size, dtype).double() for each in range(size)])
    reduced = {
        ReduceOp.sum: every.sum(0), ReduceOp.min: every.amin(0), ReduceOp.max: every.amax(0),
        ReduceOp.average: every.sum(0).float().div(size).double(), ReduceOp.product: every.float().prod(0).double(),
    }[op]  # fmt: skip
    for in_place in (False, True):
        whole = late.fill(torch.zeros(column * size, dtype=dtype), values(rank, column * size, dtype))
        part = whole.view(size, -1)[rank] if in_place else torch.zeros(column, dtype=dtype)
        what = f"scattered {column} {dtype} {op} {in_place}"
        handle = transfer.reduce_scatter(part, whole, OperationOptions(op, what), in_order=True)
        late.later(handle, part, reduced.view(size, -1)[rank].to(dtype), what)


def gathered(late: Late, column: int, dtype: torch.dtype) -> None:
    rank, size = late.bps.rank(), late.bps.size()
    for in_place in (False, True):
        whole = torch.zeros(column * size, dtype=dtype)
        part = late.fill(
            whole.view(size, -1)[rank] if in_place else torch.zeros(column, dtype=dtype), values(rank, column, dtype)
        )
        what = f"gathered {column} {dtype} {in_place}"
        handle = transfer.all_gather(whole, part, OperationOptions(name=what), in_order=True)
        late.later(handle, whole, torch.cat([values(each, column, dtype) for each in range(size)]), what)


def copied(late: Late, count: int, dtype: torch.dtype, root: int) -> None:
    tensor = late.fill(torch.zeros(count, dtype=dtype), values(late.bps.rank(), count, dtype))
    what = f"copied {count} {dtype} {root}"
    handle = transfer.broadcast(tensor, root, OperationOptions(name=what), in_order=True)
    late.later(handle, tensor, values(root, count, dtype), what)


@harness.on_ranks(**on("caabb", **TCP))
def test_a_group_in_a_job(bps: Any) -> None:
    """Its ranks do not have the numbers that they have in the job; and calls without a name are matched by order."""
    device = simulated.install(immediate=True)
    if bps.rank() > 0:
        group = bps.new_group([1, 2, 3, 4])
        place, column = group.rank, 1500
        options = OperationOptions(group=group)
        whole, part = torch.arange(4.0 * column), torch.empty(column)
        mine = whole[place * column : (place + 1) * column].clone()
        transfer.reduce_scatter(part, whole, options, in_order=True).wait()
        assert torch.equal(part, 4 * mine)
        assert device.copied_bytes == 3 * part.nbytes, "two down, and one up"
        transfer.all_gather(whole.zero_(), mine, options, in_order=True).wait()
        assert torch.equal(whole, torch.arange(4.0 * column))
        transfer.broadcast(whole.add_(place), 3, options, in_order=True).wait()
        assert torch.equal(whole, torch.arange(4.0 * column) + 2)
        with pytest.raises(bps.InvalidArgumentError):
            transfer.broadcast(whole, 0, options, in_order=True)
    bps.barrier()


# ---- What is copied and sent


COLUMN = 12_000  # elements of a part
KINDS = ("reduce_scatter", "all_gather", "broadcast")


def start(kind: str, part: torch.Tensor, whole: torch.Tensor, root: int = 0, **options: Any) -> Any:
    """Starts an operation that other ranks start in the same order."""
    found = OperationOptions(name=options.pop("name", kind), **options)
    if kind == "broadcast":
        return transfer.broadcast(whole, root, found, in_order=True)
    if kind == "all_gather":
        return transfer.all_gather(whole, part, found, in_order=True)
    return transfer.reduce_scatter(part, whole, found, in_order=True)


def bytes_of_each(bps: Any) -> dict[str, tuple[float, float]]:
    """What the device copies, and what this rank sends to others, in parts."""
    device = simulated.install(immediate=True)
    whole, part = torch.ones(COLUMN * bps.size()), torch.ones(COLUMN)

    def counts() -> tuple[int, int]:
        bps.barrier()
        return device.copied_bytes, bps.metrics()["total"]["data_bytes"]

    found = {}
    for kind in KINDS:
        start(kind, part, whole).wait()
        before = counts()
        start(kind, part, whole).wait()
        after = counts()
        found[kind] = (after[0] - before[0]) / part.nbytes, (after[1] - before[1]) / part.nbytes
    return found


@pytest.mark.parametrize(
    ("layout", "without", "expected"),
    [  # (down and up, sent by a rank in the mean); a broadcast sends along more than one way
        ("aabb", [(4 + 1, 4), (1 + 4, 4)], {"reduce_scatter": (2 + 1, 2), "all_gather": (1 + 1, 2)}),
        ("aa", [(2 + 1, 2), (1 + 2, 2)], dict.fromkeys(KINDS, (0, 0))),
        ("aab", [(3 + 1, 3), (1 + 3, 3)], {"reduce_scatter": (3 + 1, 3), "all_gather": (1 + 3, 3)}),
    ],
)
def test_bytes(layout, without, expected):
    """On each of two hosts with two ranks, half of what goes without; of hosts that differ, as much for parts."""
    whole = harness.run(bytes_of_each, **on(layout, **TCP, BPS_GPU_HOST_SUM="0"))
    found = harness.run(bytes_of_each, **on(layout, **TCP))
    for one, other in zip(whole, found, strict=True):
        assert [one[kind] for kind in KINDS[:2]] == without
        for kind, bytes_ in expected.items():
            assert other[kind] == pytest.approx(bytes_, abs=0.01), kind
    # Of a broadcast each rank of a host has its share: half of it, and all of it where it is alone.
    parts = [layout.count(host) for host in layout] if "b" in layout else []
    for one, other, part in zip(whole, found, parts, strict=False):
        assert other["broadcast"][0] == one["broadcast"][0] / part
    sent = [sum(each["broadcast"][1] for each in every) for every in (whole, found)]
    assert sent[1] < 0.7 * sent[0]


@harness.on_ranks(**harness.on_hosts("aabb"), env={**ON, **gpu_arrays.env(), **TCP})
def test_shares_on_the_route_of_the_core(bps: Any) -> None:
    """With BPS_DEVICE_ROUTE=1 they go that way."""
    device = simulated.install_on_route()
    rank, size = bps.rank(), bps.size()
    whole, part = values(rank, COLUMN * size), torch.zeros(COLUMN)
    before = gpu_arrays.copied(bps)
    start("reduce_scatter", part, whole, op=ReduceOp.sum).wait()
    assert torch.equal(part, sum(values(each, COLUMN * size) for each in range(size))[rank * COLUMN :][:COLUMN])
    start("all_gather", part.fill_(rank), whole).wait()
    assert torch.equal(whole, torch.arange(4.0).repeat_interleave(COLUMN))
    start("broadcast", part, whole.add_(rank), 2).wait()
    assert torch.equal(whole, torch.arange(4.0).repeat_interleave(COLUMN) + 2)
    bps.barrier()
    assert gpu_arrays.copied(bps) - before == (3 + 2 + 2) * part.nbytes
    assert device.copies == 0


# ---- Orders


@harness.on_ranks(**on("aa"))
def test_another_order_is_refused(bps: Any) -> None:
    """Of kinds, and of roots. On one host all ranks get the error for the same call, and go on together."""
    simulated.install(immediate=True)
    rank = bps.rank()
    told = "another operation, or one of another size, dtype, reduction or root"
    for root, kinds in ((0, ("all_gather", "reduce_scatter")), (rank, ("broadcast", "broadcast"))):
        whole, part = values(rank, 3000), values(rank, 1500)
        with pytest.raises(bps.MismatchError, match=told):
            start(kinds[rank], part, whole, root, name="t").wait()
        assert torch.equal(whole, values(rank, 3000))
        assert torch.equal(part, values(rank, 1500))
    whole = torch.full((3000,), float(rank))
    assert start("broadcast", part, whole, 1, name="t").wait().eq(1).all()


# ---- Errors


def with_a_rank_that_is_killed(bps: Any, kind: str, killed: int, noticed: bool) -> str:
    """It has said that it comes, and its GPU does not; `noticed` by the watch, otherwise by those that wait for it."""
    device = simulated.install(immediate=True)
    rank = bps.rank()
    part, whole = values(rank, 1500), values(rank, 1500 * bps.size())
    before = part.clone(), whole.clone()
    start(kind, torch.ones(1500), torch.ones(1500 * bps.size()), killed, name="t").wait()
    if not noticed:
        watch._LOOK_S = 100.0
    aborted = threading.Event()
    if noticed:  # as with NCCL, which does not see that a rank is lost
        collectives.HostCollectives.abort = lambda _: aborted.set()  # type: ignore[method-assign]
        for name in KINDS:
            setattr(collectives.HostCollectives, name, lambda *_: aborted.wait())
    elif rank == killed:  # its stream never comes to the next operation
        device.compute = simulated.Stream()
        device.compute.put(lambda: harness.await_mark("never"))
    handle = start(kind, part, whole, killed, name="t")
    assert isinstance(handle, HostOperation)
    assert handle.same is not None
    harness.eventually(handle.same[1].done, what="what both have said")
    harness.mark("second")
    with pytest.raises((bps.TransportError, bps.PeerLostError)) as caught:
        handle.wait()
    if noticed:
        assert aborted.wait(60)
    with pytest.raises((bps.TransportError, bps.PeerLostError)):
        start(kind, part, whole, killed, name="t").wait()
    bps.shutdown(0)
    assert torch.equal(part, before[0]), "what was late has not come there"
    assert torch.equal(whole, before[1])
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "noticed"), [("aa", True), ("aa", False), ("aabb", True), ("aabb", False)])
def test_a_rank_that_is_killed(kind, layout, noticed):
    """Of this host, or of the other one: an error on all others, and what they have stays as it is."""
    killed = len(layout) - 1
    with harness.start(with_a_rank_that_is_killed, kind, killed, noticed, **on(layout, **TCP)) as job:
        job.await_marks("second")
        job.kill(f"rank {killed}")
        told = [outcome.value for outcome in job.outcomes(but=[killed])[:killed]]
    for text in told:
        assert "PeerLostError" in text or (not noticed and "the GPUs of this host could not do it" in text)

# SPDX-License-Identifier: Apache-2.0
"""What scripts that were written for gloo and NCCL do with torch's backend, beside calling collectives."""

import copy
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from bodies.rails import enter
from harness import await_mark, mark, network
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import bps_rdma.torch

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def joined(backend: str = "bps", **options: Any) -> tuple[int, int]:
    dist.init_process_group(backend, timeout=timedelta(seconds=100), **options)
    return dist.get_rank(), dist.get_world_size()


def gradients_of(net: nn.Module) -> list[list[float]]:
    return [parameter.grad.flatten().tolist() for parameter in net.parameters() if parameter.grad is not None]


# ---- DistributedDataParallel


def uneven_inputs(_: Any, divides: bool) -> list[list[float]]:
    rank, _ = joined()
    net = DistributedDataParallel(nn.Linear(4, 3))
    with net.join(divide_by_initial_world_size=divides):
        for _step in range(2 + 2 * rank):
            net.zero_grad()
            net(torch.full((2, 4), rank + 1.0)).sum().backward()
    return gradients_of(net)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("env", [{}, DETAIL], ids=["", "detail"])
def test_join_takes_ranks_with_uneven_inputs(divides, env):
    """Rank 1 makes two steps alone; the mean is then that of one rank, or of both, of which one has zeros."""
    together, alone = [[3.0] * 12, [2.0] * 3], [[2.0] * 12, [1.0] * 3] if divides else [[4.0] * 12, [2.0] * 3]
    assert harness.run(uneven_inputs, divides, workers=2, init=False, env=env) == [together, alone]


@pytest.mark.parametrize("hook", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
@harness.on_ranks(workers=2, init=False)
def test_hooks_that_quantise(bps: Any, hook: str) -> None:
    """They wait for a future within the callback of another one. A quantum is 1/255 of a tensor's range."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    rank, size = joined()
    torch.manual_seed(1)
    alone = nn.Linear(64, 64)
    net = DistributedDataParallel(copy.deepcopy(alone))
    net.register_comm_hook(None, getattr(quantization_hooks, hook))
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    for one in (net, alone):
        one(inputs).pow(2).mean().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
    spread = expected.max() - expected.min()
    dist.all_reduce(expected)
    found = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert (found - expected / size).abs().max() / spread < 2 / 255


# ---- Futures and works


@harness.on_ranks(workers=2, init=False)
def test_callbacks_wait_for_futures(bps: Any) -> None:
    """Each callback starts a collective, and waits for its future."""
    rank, _ = joined()

    def reduced(level: int) -> torch.futures.Future[Any]:
        return dist.all_reduce(torch.full((2,), float(rank + level)), async_op=True).get_future()

    def below(level: int) -> Callable[[Any], list[float]]:
        def callback(future: Any) -> list[float]:
            mine = float(future.value()[0][0])
            return [mine] if level == 4 else [mine, *reduced(level).then(below(level + 1)).wait()]

        return callback

    found = reduced(0).then(below(1)).wait()
    assert found == [1, 3, 5, 7]


@harness.on_ranks(workers=3, init=False)
def test_a_callback_calls_no_collective_beside_others(bps: Any) -> None:
    """Otherwise ranks would call the two in different orders, and each could get the other's sum."""
    rank, _ = joined()
    first, second = torch.ones(4), torch.ones(4)

    def callback(future: Any) -> Any:
        dist.all_reduce(future.value()[0])

    if rank == 2:  # until it comes, the others' first sum is not over
        await_mark("called", 0, 1)
    work = dist.all_reduce(first, async_op=True)
    future = work.get_future() if rank == 2 else work.get_future().then(callback)
    other = dist.all_reduce(second, async_op=True)
    mark("called")
    other.wait()
    if rank == 2:
        future.wait()
    else:
        with pytest.raises(RuntimeError, match="a callback of a future calls a collective beside others"):
            future.wait()
    assert first.eq(3).all()
    assert second.eq(3).all()
    dist.barrier()


@harness.on_ranks(workers=2, init=False)
def test_powersgd_with_several_buckets(bps: Any) -> None:
    """With a wait() in the hook, as docs/torch-backend.md says."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    rank, _ = joined()
    torch.manual_seed(1)
    layers = [nn.Linear(40, 40) for _ in range(6)]
    net = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=40 * 40 * 4 / 2**20)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    net.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
    for _ in range(6):
        optimizer.zero_grad()
        net(inputs).pow(2).mean().backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    assert torch.equal(*theirs)


@harness.on_ranks(workers=2, init=False)
def test_works_that_nobody_waits_for(bps: Any) -> None:
    """More of them than are looked at each time."""
    _, size = joined()
    tensors = [torch.ones(4) for _ in range(300)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    last = torch.ones(1)
    dist.all_reduce(last)
    assert float(last) == size
    assert all(float(tensor[0]) == size for tensor in tensors)


@harness.on_ranks(workers=2, init=False)
def test_tensors_of_works_that_nobody_waits_for_are_let_go(bps: Any) -> None:
    """Of 4 MiB each: those of the last 64 MiB, and the one that was in progress when these began."""
    joined()
    tensors = []
    for _call in range(48):
        tensor = torch.ones(1 << 20)
        tensors.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True)
        del tensor
        dist.barrier()
    assert sum(one() is not None for one in tensors) <= 17


# ---- torch.compile


def compiled(_: Any) -> list[float]:
    rank, _ = joined()

    def collectives(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_reduce(x)
        return x + 1

    # Of 1 and 2: 2 and 2 after broadcast(), 4 and 2 after reduce(), 6 and 6, 12 and 12.
    found = torch.compile(collectives, backend="eager")(torch.full((4,), rank + 1.0))
    return found.tolist()


def test_compiled_collectives():
    assert harness.run(compiled, workers=2, init=False) == [[13.0] * 4] * 2


def compiled_training(bps: Any, ours: bool) -> list[list[float]]:
    rank, _ = joined()
    wrapper: Any = bps_rdma.torch.DistributedDataParallel if ours else DistributedDataParallel
    torch.manual_seed(1)
    net = wrapper(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
    net(inputs).pow(2).mean().backward()
    expected = gradients_of(net)
    compiled = torch.compile(net, backend="eager")
    for _step in range(2):
        net.zero_grad()
        compiled(inputs).pow(2).mean().backward()
        assert gradients_of(net) == expected
    return expected


@pytest.mark.parametrize("ours", [False, True], ids=["torch's DDP", "ours"])
def test_compiled_training(ours):
    found = harness.run(compiled_training, ours, workers=2, init=False)
    assert found[0] == found[1]


# ---- Tensors whose elements share memory


@harness.on_ranks(workers=2, init=False)
def test_tensors_whose_elements_share_memory(bps: Any) -> None:
    rank, size = joined()
    one = torch.ones(1)
    wrong: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(one.expand(4)),
        lambda: dist.all_gather_into_tensor(one.expand(4 * size), torch.ones(4)),
        lambda: dist.all_gather([one.expand(4)] * size, torch.ones(4)),
        lambda: dist.all_gather([one.expand(4 + r) for r in range(size)], torch.ones(4 + rank)),
        lambda: dist.reduce_scatter_tensor(one.expand(4), torch.ones(4 * size)),
        lambda: dist.reduce_scatter(one.expand(4 + rank), [torch.ones(4 + r) for r in range(size)]),
    ]
    for call in wrong:
        with pytest.raises(bps.InvalidTensorError, match=r"share memory.*\(0,\)"):
            call()
    # As an input it is as good as any.
    whole = torch.zeros(4 * size)
    dist.all_gather_into_tensor(whole, one.expand(4))
    assert whole.tolist() == [1.0] * (4 * size)
    sent = one.expand(4) if rank == 0 else torch.zeros(4)
    dist.broadcast(sent, 0)
    assert sent.tolist() == [1.0] * 4


ANOTHER_TORCH = """
import torch

def refuses(*_):
    raise TypeError("it takes other arguments")

frames = torch._C._dynamo.eval_frame
what = {what!r}
if what == "nothing":
    torch._C._dynamo = None
elif what == "other arguments":
    frames.set_code_exec_strategy = refuses
else:
    del frames.set_code_exec_strategy
    frames.skip_code = refuses

import bps_rdma.torch as bps

bps.init()
print(bps.push_pull(torch.ones(2), name="x").tolist())
bps.shutdown()
"""


@pytest.mark.parametrize("what", ["nothing", pytest.param("other arguments", marks=pytest.mark.long), "other names"])
def test_a_torch_that_cannot_be_told_what_to_leave_untraced(what, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", ANOTHER_TORCH.format(what=what)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "[1.0, 1.0]\n", ran.stderr


# ---- Messages


@harness.on_ranks(workers=3, init=False)
def test_receiving_starts_before_the_sender_uses_the_group(bps: Any) -> None:
    """Each rank in turn starts to receive from one that sends only after a third one has got something."""
    rank, size = joined()
    assert size == 3
    for first, second, third in itertools.permutations(range(size)):
        group = dist.new_group()
        result = torch.zeros(1)
        if rank == first:
            work = dist.irecv(result, second, group=group)
            assert work is not None
            dist.send(torch.ones(1), third, group=group)
            work.wait()
            assert float(result) == 3.0
        else:
            sender, receiver = (first, second) if rank == third else (third, first)
            dist.recv(result, sender, group=group)
            dist.send(result + 1, receiver, group=group)


@harness.on_ranks(workers=4, init=False)
def test_a_monitored_barrier_ends_at_its_timeout(bps: Any) -> None:
    """A barrier that says which rank has not come, also where that rank has never used the group."""
    rank, size = joined()
    groups = [dist.new_group([0, other]) for other in range(1, size)]
    if rank == 0:
        for group in groups:
            with pytest.raises(RuntimeError, match=r"Rank 0 timed out in monitoredBarrier|Rank 1 failed to pass"):
                group.monitored_barrier(timedelta(milliseconds=10))
    dist.barrier()


@harness.on_ranks(workers=3, init=False)
def test_two_ranks_of_three_talk(bps: Any) -> None:
    """Ranks that send nothing need not do anything for those that do."""
    rank, _ = joined()
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(torch.full((3,), 7.0), 1)
    if rank == 1:
        dist.recv(tensor, 0)
    assert tensor.tolist() == [[0, 7, 2][rank]] * 3


def where_there_is_a_gpu(_: Any, name: str, has_nccl: bool) -> list[str]:
    torch.cuda.is_available = lambda: True
    distributed_c10d.is_nccl_available = dist.is_nccl_available = lambda: has_nccl
    joined(name)
    other = dist.new_group([0, 1])
    return [str(device) for device in other._device_types]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "has_nccl", "env", "says", "warns"),
    [
        ("bps", True, {}, "go through bps_rdma, and meet in memory of the host; ", True),
        ("bps", True, {"BPS_GPU_HOST_SUM": "1"}, "go through bps_rdma; init_process_group(", False),
        ("cpu:bps,cuda:bps", False, {}, "go through bps_rdma; init_process_group(", False),
        ("cpu:bps,cuda:nccl", True, {}, "go to NCCL, not to bps_rdma", False),
        ("cpu:bps", True, {}, "", False),
    ],
)
def test_who_takes_cuda_tensors_is_said_once(
    name: str, has_nccl: bool, env: dict[str, str], says: str, warns: bool
) -> None:
    for level, heard in (("WARNING", warns), ("INFO", bool(says))):
        settings = env | {"BPS_LOG_LEVEL": level}
        with harness.start(where_there_is_a_gpu, name, has_nccl, workers=2, init=False, env=settings) as job:
            outcomes = job.outcomes()
        said = [line for one in outcomes for line in one.output.splitlines() if "CUDA tensors of" in line]
        assert len(said) == heard
        assert all(says in line for line in said)
        assert all(one.value == (["cpu", "cuda"] if says else ["cpu"]) for one in outcomes)


class Nccl(distributed_c10d.ProcessGroupGloo):
    """gloo in the place of NCCL."""

    class Options:
        """NCCL's."""

        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options._timeout == timedelta(seconds=77)
        super().__init__(store, rank, size, options._timeout)


@harness.on_ranks(workers=2, init=False)
def test_cuda_tensors_are_left_to_nccl(bps: Any) -> None:
    """Only where the name says so; NCCL is made in each group when that first needs it."""
    distributed_c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    distributed_c10d.ProcessGroupNCCL = Nccl
    dist.init_process_group("cpu:bps,cuda:nccl", timeout=timedelta(seconds=77))
    rank, pair = dist.get_rank(), dist.new_group([1, 0], timeout=timedelta(seconds=77))
    cuda, others = torch.device("cuda"), [dist.new_group(backend=name) for name in ("bps", "cpu:bps")]
    on_cpu = torch.full((3,), rank + 1.0)
    dist.all_reduce(on_cpu)
    assert on_cpu.tolist() == [3.0] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        patch.setattr(torch.Tensor, "is_cuda", True)
        for group in (dist.group.WORLD, pair):
            made: Any = group
            assert made._nccl is None
            tensor = torch.full((3,), rank + 1.0)
            assert made.allreduce([tensor]).wait()
            assert tensor.tolist() == [3.0] * 3
            assert made._get_backend(cuda) is made._nccl
        with pytest.raises(bps.InvalidTensorError, match="which this group does not take"):
            others[1].allreduce([tensor])  # type: ignore[union-attr]
    assert others[0]._get_backend(cuda) is others[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@harness.on_ranks(workers=2, init=False)
def test_calls_are_coalesced(bps: Any, device: str) -> None:
    """Older torch sends and receives CUDA tensors so (batch_isend_irecv)."""
    rank, _ = joined()
    other, kind = 1 - rank, torch.device(device)
    sent, got, summed = torch.full((50_000,), rank + 1.0), torch.zeros(50_000), torch.full((3,), rank + 1.0)
    group: Any = dist.group.WORLD
    with distributed_c10d._coalescing_manager(group, kind, async_ops=True) as together:
        dist.isend(sent, other)
        dist.irecv(got, other)
    together.wait()
    assert got.eq(other + 1.0).all()
    with distributed_c10d._coalescing_manager(group, kind):
        dist.all_reduce(summed)
    assert summed.tolist() == [3.0] * 3
    works = dist.isend(sent, other), dist.irecv(got.zero_(), other)  # no longer together
    assert all(work is not None and work.wait() for work in works)
    assert got.eq(other + 1.0).all()
    dist.barrier(device_ids=[0])


@harness.on_ranks(workers=2, init=False)
def test_torch_without_nccl_refuses_what_is_left_to_it(bps: Any) -> None:
    distributed_c10d.is_nccl_available = lambda: False
    dist.init_process_group("cpu:bps,cuda:nccl")
    with pytest.raises(bps.InvalidTensorError, match="which this torch does not have"):
        dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]


@harness.on_ranks(workers=2, init=False)
def test_send_and_recv_wait_at_once(bps: Any) -> None:
    """The thread that calls them then moves the message. isend() and irecv() call the same methods of the group."""
    rank, _ = joined()
    group: Any = dist.group.WORLD
    messages, waits = group._collectives.messages, []

    def noted(method: Callable[..., Any], *arguments: Any) -> Any:
        waits.append(arguments[-1].awaited)
        return method(*arguments)

    messages.send, messages.receive = partial(noted, messages.send), partial(noted, messages.receive)
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(tensor, 1)
        dist.isend(tensor, 1).wait()  # type: ignore[union-attr]
        group.send([tensor], 1, 0).wait()
    else:
        dist.recv(tensor, 0)
        assert tensor.eq(0).all()
        dist.irecv(tensor, 0).wait()  # type: ignore[union-attr]
        group.recv([tensor], 0, 0).wait()
    assert waits == [True, False, False]


@pytest.mark.parametrize("takes_cuda", [False, True])
@harness.on_ranks(workers=3, init=False)
def test_groups_are_split(bps: Any, takes_cuda: bool) -> None:
    """torch splits groups of processes that have an accelerator; here it is told that there is one, or the CPU is."""
    device = torch.device("cuda" if takes_cuda else "cpu", 0)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_: device
    torch.accelerator.device_count = lambda: 1
    rank, _ = joined(device_id=device) if takes_cuda else joined("cpu:bps,cuda:nccl")
    dist.group.WORLD.bound_device_id = device
    if takes_cuda:
        some = dist.new_group([0, 1])  # torch asks the backend of rank 2, too
        assert (some is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 2)
    pair = dist.split_group(split_ranks=[[2, 0]], timeout=timedelta(seconds=50), group_desc="two of them")
    assert (pair is None) == (rank == 1)
    if pair is not None:
        assert type(pair) is type(dist.group.WORLD)
        taker = "bps" if takes_cuda else "nccl"
        assert (pair.group_desc, pair.cuda_backend, dist.get_world_size(pair)) == ("two of them", taker, 2)
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=pair)
        assert tensor.tolist() == [2.0] * 3
        dist.broadcast(tensor.fill_(rank), 2, group=pair)
        assert tensor.tolist() == [2.0] * 3
        alone = dist.split_group(pair, split_ranks=[[0], [1]])
        dist.all_reduce(tensor, group=alone)
        assert tensor.tolist() == [2.0] * 3
    for _ in range(2):  # rank 1 has made fewer groups than rank 0, and torch calls the group by another name there
        other = dist.split_group(split_ranks=[[0, 1]])
        if other is not None:
            dist.all_reduce(tensor := torch.full((3,), float(rank)), group=other)
            assert tensor.tolist() == [1.0] * 3
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    whole = torch.full((3,), float(rank))
    dist.all_reduce(whole, group=mesh.get_group())
    assert whole.tolist() == [3.0] * 3


def across(_: Any, namespaces: list[str]) -> list[float]:
    enter(namespaces[int(os.environ["RANK"])])
    rank, _ = joined()
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(torch.full((3,), 7.0), 1)
    else:
        dist.recv(tensor, 0)
    mine = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    theirs = torch.empty(2)
    dist.all_to_all_single(theirs, mine)
    return [*tensor.tolist(), *theirs.tolist()]


def test_hosts_whose_own_name_is_a_loopback_address():
    """As that of every machine with Debian or Ubuntu: gloo alone would tell the other host to connect to itself."""
    if missing := network.why_not():
        pytest.skip(missing)
    with network.Network(network.PAIR) as networks:
        namespaces = [networks.namespace(member) for member in network.PAIR]
        env = {"MASTER_ADDR": networks.address("rank 0", "control"), "LOCAL_WORLD_SIZE": "1"}
        found = harness.run(across, namespaces, workers=2, env=env, init=False)
    assert found == [[0.0, 0.0, 0.0, 0.0, 10.0], [7.0, 7.0, 7.0, 1.0, 11.0]]

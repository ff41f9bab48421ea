# SPDX-License-Identifier: Apache-2.0
"""Training over RDMA ends with the weights of the same training over shared memory, to the bit.

Two ranks, or groups of two: the sum of two numbers is the same in any order.
"""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fabric
import harness
import pytest
from bodies import training
from bodies.training import Trained

pytestmark = pytest.mark.timeout(600)
MEGATRON = Path(__file__).parents[2] / "examples" / "megatron"
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: ci/setup --dev installs it"
)


@pytest.fixture(autouse=True, scope="module")
def forked_with_torch() -> Iterator[None]:
    """Ranks are forked from a process that has imported torch, and Megatron: in the VM that takes 15 s.

    It is another one than that of the other tests here, whose ranks need neither and are forked faster without them.
    """
    plain, path = list(harness.PRELOAD), list(sys.path)
    harness.end_forkserver()
    harness.PRELOAD.extend(["torch", "torch.distributed", "torch._dynamo", "bps_rdma.torch"])
    if importlib.util.find_spec("megatron"):
        sys.path.append(str(MEGATRON))
        harness.PRELOAD.extend(["cpu", "megatron.core", "bps_rdma.megatron", "gpt"])
    yield
    harness.end_forkserver()
    harness.PRELOAD[:], sys.path[:] = plain, path


PACKETS = 100  # more than connections take, less than any of these trainings sends


def trained_over(transport: str, body: Callable[..., Any], *args: Any, **options: Any) -> list[list[Trained]]:
    """The trainings of each rank. Data went over that transport and no other."""
    before = fabric.hardware_counters()
    env = harness.over(transport) | options.pop("env", {})
    found = harness.run(body, *args, env=env, timeout=250, **{"workers": 2, **options})
    for one in itertools.chain(*found):
        assert one.transports == {transport}
    if transport == "rdma" and "sent_pkts" in before:  # whatever the metrics say
        sent = fabric.hardware_counters()["sent_pkts"] - before["sent_pkts"]
        assert sent > PACKETS, f"the device has sent {sent} packets only"
    return found


def assert_same_bits(body: Callable[..., Any], *args: Any, **options: Any) -> None:
    """The training over RDMA is that over shared memory."""
    over_rdma, over_shm = (trained_over(each, body, *args, **options) for each in ("rdma", "shm"))
    for rank, (mine, other) in enumerate(zip(over_rdma, over_shm, strict=True)):
        for one, same in zip(mine, other, strict=True):
            assert one.same_bits(same), f"rank {rank}: {one} over rdma, {same} over shm"


def test_data_parallel_training() -> None:
    assert_same_bits(training.ddp, ("bucketed",))


BOTH_OVERLAPS = {"distributed_optimizer": True, "overlap": True, "overlap_gather": True}


@needs_megatron
def test_megatron_with_both_overlaps() -> None:
    assert_same_bits(training.megatron, {"layers": 2, "steps": 4, **BOTH_OVERLAPS}, init=False)


@pytest.mark.long
def test_every_strategy() -> None:
    assert_same_bits(training.ddp, training.STRATEGIES)


@pytest.mark.long
@pytest.mark.parametrize("body", [training.zero, training.torchs_zero])
def test_sharded_optimizers(body: Callable[..., list[Trained]]) -> None:
    assert_same_bits(body, init=body is training.zero)


@pytest.mark.long
def test_collectives_and_messages_of_torch() -> None:
    assert_same_bits(training.collectives, 300_000, init=False)


@pytest.mark.long
def test_fsdp2() -> None:
    assert_same_bits(training.fsdp2, init=False)


@pytest.mark.long
def test_fsdp1_with_large_parameters() -> None:
    """64 MiB each: malloc gives the pages of such an array back to the kernel, as it does not with smaller ones."""
    assert_same_bits(training.fsdp1, 4096, init=False)


def storages(bps: Any, nbytes: int) -> tuple[list[bool], int, bool]:
    """A storage that is emptied and filled again between its uses, as those of FSDP are."""
    import ctypes

    import torch

    tensor = torch.empty(nbytes // 4)
    storage = tensor.untyped_storage()
    right, addresses = [], set()
    for step in range(4):
        tensor.fill_(bps.rank() + step)
        addresses.add(tensor.data_ptr())
        bps.push_pull_inplace(tensor, average=False, name="storage")
        right.append(bool((tensor == 1 + 2 * step).all()))
        storage.resize_(0)
        ctypes.CDLL(None).malloc_trim(0)
        storage.resize_(nbytes)
    return right, len(addresses), bps.metrics()["total"]["given_back"] > 0


@pytest.mark.parametrize("size", [1 << 20, 64 << 20], ids=["in the heap", "mapped"])
def test_a_storage_that_is_emptied_and_filled(size: int) -> None:
    found = harness.run(storages, size, workers=2, env=harness.over("rdma"), timeout=250)
    assert [right for right, _, _ in found] == [[True] * 4] * 2
    if size > 32 << 20:  # otherwise nothing was shown
        assert [(addresses, given_back) for _, addresses, given_back in found] == [(1, True)] * 2


@pytest.mark.long
@needs_megatron
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"bf16": True, "fp32_gradients": True, **BOTH_OVERLAPS}],
    ids=["plain", "overlap", "bf16 with both overlaps"],
)
def test_megatron(options: dict[str, Any]) -> None:
    assert_same_bits(training.megatron, {"steps": 4, **options}, init=False)


@pytest.mark.long
@needs_megatron
@pytest.mark.parametrize("tensors", [False, True], ids=["over gloo", "over bps_rdma"])
def test_megatron_with_tensor_parallelism(tensors: bool) -> None:
    """Two ranks of tensor parallelism, two of data parallelism."""
    assert_same_bits(
        training.megatron, {"tp": 2, "layers": 2, "steps": 3, **BOTH_OVERLAPS}, tensors, workers=4, init=False
    )


FAILOVER = {
    "BPS_MIN_WORKERS": "2",
    "BPS_SERVER_FAILOVER": "1",
    "BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE),
}


@pytest.mark.long
def test_a_server_is_killed_in_training() -> None:
    """The weights are those of a training in which nothing was lost."""
    steps = 60
    undisturbed = trained_over("rdma", training.ddp, ("bucketed",), steps, servers=2, env=FAILOVER)
    env = harness.over("rdma") | FAILOVER
    with harness.start(training.ddp, ("bucketed",), steps, 10, workers=2, servers=2, env=env) as job:
        job.await_marks("running")
        job.kill("server 1")
        outcomes = job.outcomes()
        job.helper_statuses(but=["server 1"])
    for outcome, (expected,) in zip(outcomes, undisturbed, strict=True):
        assert outcome.value, outcome.error + outcome.output
        (found,) = outcome.value
        assert (expected.servers, found.servers) == (2, 1), "the server was lost before the end"
        assert found.transports == {"rdma"}
        assert found.same_bits(expected), f"{found} is not {expected}"

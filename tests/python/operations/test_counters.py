# SPDX-License-Identifier: Apache-2.0
"""What the counters prove: two writes per partition, no payload on control endpoints, no copies, the bytes expected."""

from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.counters import COUNT, PARTITION, measured

OPERATIONS = ("push_pull", "reduce_scatter", "all_gather")


def totals(op: str, transport: str, memory: str, workers: int = 2, rounds: int = 7) -> dict[str, int]:
    env = harness.over(transport) | harness.cut_at(PARTITION)
    found = harness.run(measured, op, memory, rounds, workers=workers, env=env)
    return {name: sum(one[name] for one in found) for name in found[0]}


@pytest.mark.rdma
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_two_writes_per_partition(transport, workers):
    sums = totals("push_pull", transport, "plain", workers)
    partitions = 10 * 7 * workers
    assert sums["partitions"] == partitions
    assert sums["data_writes"] == 2 * partitions
    assert sums["pushes"] == partitions
    assert sums["stale"] == 0


@pytest.mark.rdma
@pytest.mark.parametrize("memory", ["plain", "empty"])
def test_control_endpoints_carry_no_payload(transport, memory):
    sums = totals("push_pull", transport, memory, rounds=20)
    payload = 20 * 2 * COUNT * 4
    assert sums["data_bytes"] >= payload
    # Credits only: under a hundred bytes for each slot of 16 KiB, and none where nothing lands in slots. A rank that
    # waits for half a second, on a busy machine, asks in a few bytes whether the server lives.
    assert sums["control_bytes"] <= (1000 if transport == "shm" else payload // 100)
    assert transport != "rdma" or sums["copies"] == 0


def messages_of(bps: Any, calls: int) -> int:
    array = np.ones(1000, np.uint8)
    bps.push_pull_inplace(array, average=False, name="small")
    before = bps.metrics()["total"]["control_messages"]
    for _ in range(calls):
        bps.push_pull_inplace(array, average=False, name="small")
    sent: int = bps.metrics()["total"]["control_messages"] - before
    return sent


@pytest.mark.rdma
def test_small_sums_need_hardly_a_message(transport):
    """Servers announce the slots of many of them together."""
    calls = 320
    assert sum(harness.run(messages_of, calls, workers=2, env=harness.over(transport))) <= calls // 16


def test_mapped_memory_is_never_copied():
    assert totals("push_pull", "shm", "empty")["copies"] == 0
    assert totals("push_pull", "shm", "plain")["copies"] > 0  # the counter counts


def copies_of(bps: Any, elements: int) -> int:
    array = np.ones(elements, np.float32)
    for round_ in range(1, 6):
        bps.push_pull_inplace(array, average=False, name="x")
        assert np.all(array == 2**round_)
    copies: int = bps.metrics()["total"]["copies"]
    return copies


@pytest.mark.parametrize(("elements", "by_server"), [(1000, False), (1 << 17, True), (1 << 20, True)])
def test_small_tensors_in_plain_memory_are_copied_by_their_worker(elements, by_server):
    """A server would need two system calls for each of them. Rounds: five, of two workers."""
    job = harness.start(copies_of, elements, workers=2, servers=1, python_servers=True, env={"BPS_TRANSPORT": "shm"})
    with job:
        by_workers = job.results()
        assert (job.server_metrics()[0]["copies"] > 0) == by_server
    assert by_workers == ([0, 0] if by_server else [10, 10])


@pytest.mark.parametrize(("elements", "staged"), [(1 << 18, True), (1 << 19, False)])
@harness.on_ranks(workers=2, env={"BPS_TRANSPORT": "shm"})
def test_workers_that_sum_copy_larger_tensors_themselves(bps: Any, elements: int, staged: bool) -> None:
    """Each sums a half, and copies the other one through buffers that its peer maps."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:")

    bps.push_pull_inplace(np.ones(1 << 21, np.float32), name="larger")  # after this one, all else is mapped
    before = mapped()
    array = np.ones(elements, np.float32)
    bps.push_pull_inplace(array, average=False, name="x")
    assert np.all(array == 2)
    assert (mapped() > before) == staged


def test_bytes_moved(transport):
    rounds, workers = 7, 2
    whole = COUNT * 4 * rounds
    # Push: everything, from every rank. Pull over a network: everything to those ranks that are not the server itself.
    counted = {
        op: totals(op, transport, "empty", workers, rounds) for op in ("push_pull", "reduce_scatter", "all_gather")
    }
    push_pull, scatter, gather = (one["data_bytes"] for one in counted.values())
    # By servers, and by ranks, wherever the bytes come from.
    assert [one["received_bytes"] for one in counted.values()] == [
        whole * workers + whole * workers, whole * workers + whole, whole + whole * (workers - 1)
    ]  # fmt: skip
    if transport == "tcp":
        assert push_pull == whole * workers + whole
        assert scatter == whole * workers  # the own part is summed where it is wanted: no answer travels
        assert gather == whole + whole  # each part is pushed once (by pointer), and sent to one other rank
    else:
        assert push_pull == whole * workers  # offered in place; answers are written by whoever sums
        assert scatter == whole * workers
        assert gather == whole

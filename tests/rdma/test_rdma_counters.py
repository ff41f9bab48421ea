# SPDX-License-Identifier: Apache-2.0
"""What is counted, by us, by the kernel and by the device.

Two writes per partition, no payload on control, one plane per queue pair, and nothing left behind.
"""

from pathlib import Path
from typing import Any

import fabric
import harness
import numpy as np
import pytest
from bodies.counters import COUNT, PARTITION, measured
from bodies.metrics import fetch, samples
from harness import await_mark, mark
from levels import cases

RDMA = harness.over("rdma")
ROUNDS = 10
CUT = harness.cut_at(PARTITION)


def works_on_demand(bps: Any) -> None:
    bps.push_pull(np.ones(COUNT, np.float32), name="x")
    bps.barrier()
    mark("ready")
    await_mark("go")
    for _ in range(ROUNDS):
        bps.push_pull(np.ones(COUNT, np.float32), name="x")
    bps.barrier()
    mark("worked")
    await_mark("end")


def packets(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Sent by a queue pair: its packet sequence number counts them."""
    return int(after["sq-psn"] - before["sq-psn"]) % 2**24


@pytest.mark.skipif(not fabric.is_rxe(), reason="only rxe shows the packet sequence numbers of queue pairs")
@pytest.mark.parametrize("data_pairs", cases([2], [1]))
def test_the_kernel_sees_the_planes_apart(data_pairs):
    """Two workers, one server: between each two a control and data queue pairs of their own; what each one carries."""
    env = RDMA | CUT | {"BPS_RDMA_QPS": str(data_pairs), "BYTEPS_SERVER_ENGINE_THREAD": "1"}
    with harness.start(works_on_demand, workers=2, servers=1, env=env) as job:
        job.await_marks("ready")
        server = job.pid("server 0")
        pids = [job.pid("rank 0"), job.pid("rank 1"), server]
        before = {qp["lqpn"]: qp for qp in fabric.queue_pairs(pids)}
        counted = fabric.hardware_counters()
        job.set_mark("go")
        job.await_marks("worked")
        after = {qp["lqpn"]: qp for qp in fabric.queue_pairs(pids)}
        counted = {name: value - counted[name] for name, value in fabric.hardware_counters().items()}
        job.set_mark("end")
        job.results()
    assert before.keys() == after.keys(), "no queue pair comes or goes while a job works"
    assert {qp["state"] for qp in after.values()} == {"RTS"}
    for number, qp in after.items():
        assert after[qp["rqpn"]]["rqpn"] == number, "each is connected to one other of this job"
    assert len(after) == 2 * 2 * (1 + data_pairs)

    mtu = 4096
    writes = ROUNDS * COUNT * 4 // PARTITION
    pushed = writes * -(-(PARTITION + 64) // mtu)  # a header of 64 bytes in front of each
    pulled = writes * -(-PARTITION // mtu)
    for pid in pids[:2]:
        mine = [number for number, qp in after.items() if qp["pid"] == pid]
        assert {after[after[number]["rqpn"]]["pid"] for number in mine} == {server}
        there = {number: packets(before[number], after[number]) for number in mine}
        back = {number: packets(before[other], after[other]) for number in mine for other in [after[number]["rqpn"]]}
        # One carries control messages: fewer of them than there are partitions, and each of one packet. What is left is
        # the payload, to the packet.
        rest = {c: (sum(there.values()) - there[c], sum(back.values()) - back[c]) for c in mine}
        matching = [c for c in mine if rest[c] == (pushed, pulled)]
        assert len(matching) == 1, f"sent {there}, received {back}, expected {pushed} and {pulled}"
        assert there[matching[0]] <= writes
        assert back[matching[0]] <= writes
    if "sent_pkts" in counted:
        assert counted["sent_pkts"] >= 2 * (pushed + pulled)  # and acknowledgements
        assert counted.get("retry_exceeded_err", 0) == 0


@pytest.mark.vm
@pytest.mark.parametrize("servers", cases([None], [1]))
def test_two_devices_share_the_loops(spare_device, servers):
    """Listing several devices uses each, in turn by the loops."""
    env = RDMA | CUT | {"BPS_RDMA_HCA": f"={fabric.HCA},{spare_device.hca}"}
    env |= {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}
    devices = (fabric.HCA, spare_device.hca)
    before = [fabric.hardware_counters(hca)["sent_pkts"] for hca in devices]
    found = harness.run(measured, "push_pull", "plain", 20, workers=2, servers=servers, env=env)
    sent = [fabric.hardware_counters(hca)["sent_pkts"] - b for hca, b in zip(devices, before, strict=True)]
    assert all(one["copies"] == 0 for one in found)
    # As much as a rank pushes in one round of the twenty, which is more than all control messages.
    assert min(sent) >= COUNT * 4 // 4096, f"packets sent: {dict(zip(devices, sent, strict=True))}"


def port_events(port: int) -> dict[str, float]:
    """What the metrics of a rank say of the device under test, by the names of its driver."""
    return {
        one.labels["counter"]: one.value
        for one in samples(fetch(port)[2])
        if one.name == "bps_rdma_port_events_total" and one.labels["device"] == fabric.HCA
    }


def test_metrics_tell_what_the_device_counts():
    """Packets, and retransmissions, which are what a network with losses shows first."""
    port = harness.free_ports(2)
    env = RDMA | CUT | {"BPS_METRICS_PORT": str(port)}
    with harness.start(works_on_demand, workers=2, env=env) as job:
        job.await_marks("ready")
        told = [port_events(port)]
        counted = [fabric.hardware_counters()]
        job.set_mark("go")
        job.await_marks("worked")
        counted.append(fabric.hardware_counters())
        told.append(port_events(port))
        job.set_mark("end")
        job.results()
    assert set(told[0]) >= set(counted[0])
    if fabric.is_rxe():
        assert {"sent_pkts", "retry_exceeded_err", "completer_retry_err", "out_of_seq_request"} <= set(told[0])
        assert told[1]["sent_pkts"] - told[0]["sent_pkts"] >= 2 * ROUNDS * COUNT * 4 // 4096
    for name in {"sent_pkts", "rcvd_pkts"} & set(told[0]):  # looks are one after the other, and counters only grow
        looks = [told[0][name], counted[0][name], counted[1][name], told[1][name]]
        assert looks == sorted(looks), name


def test_a_job_leaves_no_verbs_objects():
    before = fabric.resources()
    harness.run(measured, "push_pull", "plain", 3, workers=2, servers=1, env=RDMA)
    comes_back_to(before)


def comes_back_to(expected: dict[str, int]) -> None:
    """The device has these objects, soon: the kernel frees a queue pair after its owner has gone."""
    harness.eventually(lambda: fabric.resources() == expected, what=f"the device's objects as before, {expected},")


def test_killed_processes_leave_no_verbs_objects():
    before = fabric.resources()
    with harness.start(works_on_demand, workers=2, servers=1, env=RDMA) as job:
        job.await_marks("ready")
        for member in ("rank 0", "rank 1", "server 0", "scheduler"):
            job.kill(member)
    comes_back_to(before)


def joins_again_and_again(bps: Any, cycles: int) -> None:
    def cycle() -> None:
        bps.init()
        bps.push_pull(np.ones(100, np.float32), name="x")
        bps.barrier()
        bps.shutdown()

    for _ in range(3):
        cycle()
    mark("settled")
    await_mark("counted")
    for _ in range(cycles):
        cycle()
    mark("done")
    await_mark("end")


@pytest.mark.long
@pytest.mark.slow
def test_joining_and_leaving_leaves_nothing():
    """What the kernel holds while no job is on is the same before and after; init() and shutdown() in one process."""
    with harness.start(joins_again_and_again, 30, workers=2, env=RDMA, init=False) as job:
        job.await_marks("settled")
        before = fabric.resources()
        job.set_mark("counted")
        job.await_marks("done", timeout=240)
        comes_back_to(before)
        job.set_mark("end")
        job.results()


def many_operations(bps: Any, operations: int) -> None:
    def work(count: int) -> None:
        for first in range(0, count, 100):
            arrays = [np.full(50 + i, first + i, np.float32) for i in range(100)]  # new memory each time
            handles = [bps.push_pull_async_inplace(a, False, f"n{i}") for i, a in enumerate(arrays)]
            bps.wait(handles)
            assert all((a == 2 * (first + i)).all() for i, a in enumerate(arrays))

    work(5_000)
    bps.barrier()
    mark("settled")
    await_mark("counted")
    work(operations)
    bps.barrier()
    mark("done")
    await_mark("end")


def resident_kib(pid: int) -> int:
    """Of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_operations_leave_memory_and_regions_as_they_were():
    with harness.start(many_operations, 50_000, workers=2, servers=1, env=RDMA) as job:
        job.await_marks("settled", timeout=120)
        before = fabric.resources()
        members = ("rank 0", "rank 1", "server 0")
        resident = {name: resident_kib(job.pid(name)) for name in members}
        job.set_mark("counted")
        job.await_marks("done", timeout=200)
        after = fabric.resources()
        assert after["qp"] == before["qp"]
        assert after["cq"] == before["cq"]
        assert after["mr"] <= before["mr"] + 8  # the cache may hold other ranges of the same heap
        for name in members:
            assert resident_kib(job.pid(name)) - resident[name] <= 4096, name
        job.set_mark("end")
        job.results(timeout=60)

# SPDX-License-Identifier: Apache-2.0
"""Jobs on several hosts: sums, and what the links carry. With default settings.

How much of a link's rate is used is printed (`pytest -rP`, and by the step of CI), and no condition: on a busy machine
its processors decide.
"""

import pytest
from lab_job import MIB, Job

RATE = 100.0  # Mbit/s
TENSOR = 8 * MIB
PARTITION = 64 << 10  # what suits links of this rate
LARGEST = 512 << 10  # by default
MOST = 1.2  # times the tensor: headers, and what a busy machine acknowledges so late that it is sent again


def per_round(before, after, rounds):
    """Times the tensor that each link carried: from the host, to the host."""
    links = zip(before, after, strict=True)
    return [[(b - a) / rounds / TENSOR for a, b in zip(*link, strict=True)] for link in links]


def share(goodput):
    """Of the line rate, in words: the median of the rounds, and quartiles."""
    low, middle, high = (mbit / RATE for mbit in goodput)
    return f"{middle:.2f} of the line rate ({low:.2f} to {high:.2f})"


def measured(lab, workers, servers, rounds=8, env=None):
    """(goodput of a worker, times the tensor that each link carried, parts of the sums); the sums are right."""
    before = lab.carried()
    with Job(workers, servers, rounds, TENSOR, env=env) as job:
        job.finish()
    assert job.partitions() == {TENSOR / PARTITION}
    return job.goodput(TENSOR), per_round(before, lab.carried(), rounds), job.shares()


def test_dedicated_servers(lab):
    hosts = lab.hosts
    lab.shape(RATE)
    goodput, carried, _ = measured(lab, hosts[:2], hosts[2:])
    print("goodput, 2 workers and 2 servers:", share(goodput))
    # Each link carries the tensor once in each direction, and headers.
    for link in carried:
        assert all(1 <= times < MOST for times in link), carried


def test_servers_inside_the_workers(lab):
    hosts = lab.hosts[:2]
    lab.shape(RATE)
    goodput, carried, _ = measured(lab, hosts, [])
    print("goodput, 2 workers with servers inside:", share(goodput))
    # Half of the tensor is summed at home: a link carries that half of the other rank, and the answer of this one's.
    for link in carried[:2]:
        assert all(1 <= times < MOST for times in link), carried


def test_one_spare_host(lab):
    """It sums 0.4, and each worker 0.2, so that every link carries 1.2 times the tensor in each direction."""
    lab.shape(RATE)
    goodput, carried, shares = measured(lab, lab.hosts[:3], lab.hosts[3:])
    best = RATE / 1.2
    print(f"goodput, 3 workers and 1 spare host: {share(goodput)}; {goodput[1] / best:.2f} of the best")
    assert shares == pytest.approx([0.2, 0.2, 0.2, 0.4], abs=1e-4)
    due = [1 + part for part in shares[:3]] + [3 * shares[3]]
    pieces = 2 * 3 * PARTITION / TENSOR  # two pieces less than its part, of three workers
    for times, link in zip(due, carried, strict=True):
        assert all(times - pieces <= found < MOST * times for found in link), carried


def test_partitions_where_tcp_takes_another_network(lab):
    """What TCP measures there says nothing about the links of RDMA."""
    with Job(lab.hosts[:2], [], 2, TENSOR, env={"BPS_INTERFACE": "m0", "BPS_RDMA_HCA": "rxe0"}) as job:
        job.finish()
    assert job.partitions() == {TENSOR / LARGEST}


def test_two_ranks_on_each_of_two_hosts(lab):
    """Servers inside the workers: shared memory within a host, RDMA between them."""
    a, b = lab.hosts[:2]
    with Job([a, a, b, b], [], 6, TENSOR) as job:
        job.finish()


@pytest.mark.parametrize("queue", ["200ms", pytest.param("10ms", marks=pytest.mark.long)])
def test_incast(lab, queue):
    """Three workers on one server share its link: a third for each, because no worker sums. A short queue drops."""
    lab.shape(RATE, queue)
    port = lab.hosts[3]
    goodput, _, shares = measured(lab, lab.hosts[:3], [port], rounds=5, env={"BPS_PLACEMENT": "dedicated"})
    assert shares == [0, 0, 0, 1]
    dropped = lab.switch.dropped(port, 0)
    print(f"goodput, 3 workers on 1 server, queue of {queue}: {share(goodput)}; {dropped} packets dropped")


DELAY, LOSS = ("delay", "5ms"), ("loss", "1%")
long = pytest.mark.long


@pytest.mark.parametrize("netem", [LOSS, pytest.param(DELAY, marks=long), pytest.param(DELAY + LOSS, marks=long)])
def test_loss_and_delay(lab, netem):
    lab.disturb("rate", f"{RATE}mbit", *netem)
    with Job(lab.hosts[:2], lab.hosts[2:], 8, MIB) as job:
        job.finish(timeout=120)
    print(f"goodput, 2 workers and 2 servers, {' '.join(netem)}: {share(job.goodput(MIB))}")

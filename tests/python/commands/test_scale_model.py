# SPDX-License-Identifier: Apache-2.0
"""The scale model against what can be worked out by hand, and against what the link lab measured."""

import json
from pathlib import Path

import pytest

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.bench.plan import parse_size
from bps_rdma.tools.scale_model import (
    HEADER_BYTES,
    SMALL_SLOT,
    Hosts,
    Protocol,
    best_seconds,
    partition_for,
    ring_seconds,
    simulate,
    spare_share,
)

MIB = 1 << 20
# No processor, no headers: what is left is arithmetic.
IDEAL = Protocol(partition_bytes=MIB, latency_s=0, sum_bytes_per_s=1e15, piece_s=0, wire=1)
BYTES_PER_S = 1e9 / 8  # of a link of 1 Gbit/s


def apart(workers, servers, gbit=1.0):
    return [Hosts(workers, gbit, worker=True), Hosts(servers, gbit, server=True)]


def both(workers, spares, gbit=1.0):
    """Servers inside the workers, and on spare hosts."""
    inside = Hosts(workers, gbit, worker=True, server=True)
    return [inside, Hosts(spares, gbit, server=True)] if spares else [inside]


def test_one_worker_and_one_server_are_a_pipeline():
    found = simulate(apart(1, 1), 100 * MIB, IDEAL)
    push = (MIB + HEADER_BYTES) / BYTES_PER_S
    assert found.seconds == pytest.approx(100 * push + MIB / BYTES_PER_S)  # the last answer follows the last push


def test_latency_and_summing_come_once_to_a_full_pipeline():
    slower = Protocol(partition_bytes=MIB, latency_s=0.01, sum_bytes_per_s=1e10, piece_s=1e-4, wire=1)
    more = simulate(apart(1, 1), 100 * MIB, slower).seconds - simulate(apart(1, 1), 100 * MIB, IDEAL).seconds
    assert more == pytest.approx(2 * 0.01 + MIB / 1e10 + 1e-4)


def test_a_small_window_waits_for_the_latency():
    far = Protocol(partition_bytes=MIB, latency_s=0.05, window=1, sum_bytes_per_s=1e15, piece_s=0, wire=1)
    found = simulate(apart(1, 1), 20 * MIB, far)
    # A slot is free again when its piece has arrived and been summed: one way.
    assert found.seconds > 20 * 0.05
    wide = Protocol(partition_bytes=MIB, latency_s=0.05, window=16, sum_bytes_per_s=1e15, piece_s=0, wire=1)
    assert simulate(apart(1, 1), 20 * MIB, wide).seconds < 0.5 * found.seconds


@pytest.mark.parametrize(("workers", "servers"), [(1, 4), (4, 4), (8, 2), (3, 5), (64, 16)])
def test_every_byte_crosses_a_link_once_each_way(workers, servers):
    nbytes = 240 * MIB
    found = simulate(apart(workers, servers), nbytes, IDEAL)
    header = 240 * HEADER_BYTES
    ours, theirs = found.links
    assert ours.up == pytest.approx(nbytes + header)
    assert ours.down == pytest.approx(nbytes)
    assert theirs.down == pytest.approx(workers * (nbytes + header) / servers)
    assert theirs.up == pytest.approx(workers * nbytes / servers)
    line = nbytes / BYTES_PER_S * max(1, workers / servers)
    assert line < found.seconds < line * (1 + 2.1 * max(workers, servers) / 240)
    assert found.data_writes == 2 * workers * 240


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_a_host_share_its_link_at_no_cost(ranks):
    for kinds in ([Hosts(4, 1, worker=True, server=True)], apart(4, 4)):
        shared = [Hosts(h.count, 1, h.worker, h.server, ranks if h.worker else 1) for h in kinds]
        alone, found = simulate(kinds, 256 * MIB, IDEAL), simulate(shared, 256 * MIB, IDEAL)
        assert [(link.up, link.down) for link in found.links] == [(link.up, link.down) for link in alone.links]
        assert found.seconds <= alone.seconds * 1.001
        assert found.data_writes == alone.data_writes


def test_servers_inside_the_workers_carry_what_a_ring_does():
    found = simulate([Hosts(8, 1, worker=True, server=True)], 64 * MIB, IDEAL)
    assert found.links[0].down == pytest.approx(2 * 7 / 8 * 64 * MIB, rel=1e-3)
    assert found.seconds == pytest.approx(ring_seconds(8, 1, 64 * MIB, IDEAL), rel=0.1)


def test_a_slow_server_gets_less():
    slow = [Hosts(4, 1, worker=True), Hosts(3, 1, server=True), Hosts(1, 0.25, server=True)]
    found = simulate(slow, 256 * MIB, IDEAL)
    assert found.seconds == pytest.approx(256 * MIB / BYTES_PER_S * 4 / 3.25, rel=0.1)
    assert found.links[2].down == pytest.approx(found.links[1].down / 4, rel=0.1)


@pytest.mark.parametrize("workers", [3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_links_are_as_full_as_the_optimum_says(workers):
    """The pieces are dealt as the core deals them; what is left is the start and the end of the round."""
    for spares in range(workers + 1):
        hosts = both(workers, spares)
        found = simulate(hosts, 4096 * MIB, IDEAL)
        best = best_seconds(hosts, 4096 * MIB)
        ring = workers / (2 * (workers - 1))
        assert best == pytest.approx(4096 * MIB / BYTES_PER_S / (ring + (1 - ring) * spares / workers), rel=1e-6)
        assert max(link.up for link in found.links) == pytest.approx(best * BYTES_PER_S, rel=0.01)
        part = 2 * spares * (workers - 1) / (workers**2 + spares * workers - 2 * spares)
        assert spare_share(hosts) == pytest.approx(part)
        if spares:
            assert found.links[1].down * spares == pytest.approx(4096 * MIB * workers * part, rel=0.01)


def test_each_host_may_have_a_link_of_its_own():
    links = [1.0, 0.5, 0.75, 1.0]
    each = [Hosts(1, gbit, worker=True, server=True) for gbit in links]
    found = simulate(each, 256 * MIB, IDEAL)
    assert best_seconds(each, 256 * MIB) <= found.seconds < 1.05 * best_seconds(each, 256 * MIB)
    assert len(found.links) == 4
    together = [Hosts(2, 1.0, True, True), *each[1:3]]
    assert simulate(together, 256 * MIB, IDEAL).seconds == pytest.approx(found.seconds, rel=0.02)


def test_partitions_suit_the_slowest_link():
    assert partition_for(both(4, 1, 0.1)) == 16 << 10
    assert partition_for(both(4, 1, 400)) == 512 << 10
    assert partition_for([*both(4, 1, 400), Hosts(1, 10, server=True)]) == 192 << 10


def test_a_slow_worker_holds_everybody_up():
    slow = [Hosts(3, 1, worker=True), Hosts(1, 0.5, worker=True), Hosts(4, 1, server=True)]
    assert simulate(slow, 256 * MIB, IDEAL).seconds == pytest.approx(2 * 256 * MIB / BYTES_PER_S, rel=0.05)


@pytest.mark.parametrize("servers", [5, 9, 12, 13])
def test_one_server_more_does_not_slow_anybody_down(servers):
    before, after = (simulate(apart(8, count), 256 * MIB, IDEAL) for count in (servers - 1, servers))
    assert after.seconds < before.seconds * 1.05
    assert after.seconds == pytest.approx(256 * MIB / BYTES_PER_S * max(1, 8 / servers), rel=0.12)


def test_small_tensors_are_cut_finer():
    """Four pieces for each loop, of 64 KiB at least."""
    found = simulate(apart(4, 8), 4 * MIB, IDEAL)
    assert found.data_writes == 2 * 4 * 32
    found = simulate(apart(4, 8), 256 << 10, IDEAL)
    assert found.links[1].down == pytest.approx(4 * ((64 << 10) + HEADER_BYTES))  # of those that have a piece


def test_memory_is_that_of_the_windows():
    protocol = Protocol(partition_bytes=MIB, window=4, server_loops=2)
    found = simulate(apart(10, 3), 1000 * MIB, protocol)
    assert found.server_memory == 10 * 2 * (4 * (MIB + HEADER_BYTES) + 128 * SMALL_SLOT)
    assert simulate(apart(10, 3), 4000 * MIB, protocol).server_memory == found.server_memory


def test_thousands_of_workers_share_a_servers_memory():
    small = Protocol(server_memory=1 << 30, server_loops=4)
    few, many = (simulate(apart(n, 8, 400), 1 << 28, small).server_memory for n in (8, 4096))
    assert few == 8 * 4 * (4 * ((512 << 10) + HEADER_BYTES) + 128 * SMALL_SLOT)
    assert many == 4096 * 4 * ((512 << 10) + HEADER_BYTES + 8 * SMALL_SLOT), "a slot each, whatever the limit"


def test_thousands_of_hosts_change_nothing():
    large, again = (simulate(apart(4096, 512, 400), 1 << 30) for _ in range(2))
    assert large == again
    assert large.seconds > (1 << 30) * 8 / (400e9 / 8)  # eight workers share a server's link


MEASURED = json.loads((Path(__file__).parents[3] / "bench/spare_hosts.json").read_text())


@pytest.mark.parametrize("row", MEASURED["found"], ids=lambda row: f"{row['servers']}-spare-hosts")
def test_spare_hosts_bring_what_was_measured(row):
    """docs/servers.md and docs/spare_hosts.png show the measurements of bench/link_lab.py that are stored there."""
    hosts = both(MEASURED["workers"], row["servers"], MEASURED["rate"] / 1e3)
    protocol = Protocol(partition_bytes=partition_for(hosts), server_loops=MEASURED["server_loops"])
    found = simulate(hosts, parse_size(MEASURED["size"]), protocol)
    assert found.goodput / 1e6 == pytest.approx(row["bps_rdma"]["goodput_mb_per_s"], rel=0.05)


# Measured in the same way, with links that differ: Gbit/s of workers and of spare hosts, and the goodput's share of
# 100 Mbit/s.
LINKS = [([0.1] * 4, [0.1, 0.025], 0.736), ([0.1, 0.1, 0.1, 0.05], [], 0.493), ([0.1] * 3, [0.1], 0.820)]


@pytest.mark.parametrize(("workers", "spares", "measured"), LINKS)
def test_links_that_differ_bring_what_was_measured(workers, spares, measured):
    hosts = [Hosts(1, gbit, True, True) for gbit in workers] + [Hosts(1, gbit, server=True) for gbit in spares]
    found = simulate(hosts, 32 * MIB, Protocol(partition_bytes=64 << 10, server_loops=2))
    assert found.goodput / 12.5e6 == pytest.approx(measured, rel=0.05)


# Parts of the optimum, with pieces of 64 KiB.
MANY = [
    ([Hosts(2, 0.1, True, True, 4), Hosts(spares, 0.1, server=True)], found) for spares, found in ((1, 0.97), (2, 0.98))
]


@pytest.mark.parametrize(("hosts", "measured"), MANY)
def test_hosts_of_several_ranks_bring_what_was_measured(hosts, measured):
    found = simulate(hosts, 32 * MIB, Protocol(partition_bytes=64 << 10, server_loops=2))
    assert best_seconds(hosts, 32 * MIB) / found.seconds == pytest.approx(measured, rel=0.05)


def lab(workers, ranks, servers):
    inside = servers == 0
    hosts = [Hosts(workers, 0.3, worker=True, server=inside, ranks=ranks)]
    return hosts if inside else [*hosts, Hosts(servers, 0.3, server=True)]


# As bench/link_lab.py measured: 300 Mbit/s, 64 MiB in pieces of 128 KiB, seconds (see docs/notes/measurements.md).
LAB = [(lab(2, 1, 2), 1.834), (lab(4, 1, 4), 1.885), (lab(4, 1, 0), 2.717), (lab(4, 1, 2), 3.707),
       (lab(2, 2, 2), 1.847), (lab(4, 2, 0), 2.783), (lab(4, 2, 4), 1.910)]  # fmt: skip


@pytest.mark.parametrize(("hosts", "measured"), LAB)
def test_within_a_twentieth_of_the_link_lab(hosts, measured):
    found = simulate(hosts, 64 * MIB, Protocol(partition_bytes=128 << 10, server_loops=2))
    assert found.seconds == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("hosts", "nbytes"),
    [([], 1), (apart(1, 1), 0), ([Hosts(1, 1, worker=True)], 1), ([Hosts(1, 1, server=True)], 1),
     ([*apart(1, 1), Hosts(1, 1)], 1), (apart(0, 1), 1), (apart(1, 1, 0), 1), (both(1, 1, -1), 1)],
)  # fmt: skip
def test_impossible_clusters_are_refused(hosts, nbytes):
    with pytest.raises(InvalidArgumentError):
        simulate(hosts, nbytes)

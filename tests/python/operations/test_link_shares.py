# SPDX-License-Identifier: Apache-2.0
"""How much the servers of each host sum: the closed forms, and a linear program as an oracle."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.optimize import linprog

from bps_rdma import _core


@dataclass(frozen=True)
class Host:
    link: float = 1
    contributions: int = 0
    sums: float = math.inf


def shares_of(hosts: list[Host]) -> tuple[list[float], float]:
    sites = [(host.link, host.sums, host.contributions) for host in hosts]
    shares = _core.link_shares(sites)
    return shares, _core.seconds_per_byte(sites, shares)


def least_seconds(hosts: list[Host]) -> float:
    """The linear program: the variables are the shares and the time, and no link and no server may take longer."""
    count, contributions = len(hosts), sum(host.contributions for host in hosts)
    rows, bounds = [], []
    for index, host in enumerate(hosts):
        on_link = np.zeros(count + 1)
        on_link[index], on_link[-1] = contributions - 2 * host.contributions, -host.link
        rows.append(on_link)
        bounds.append(-host.contributions)
        if 0 < host.sums < math.inf:
            summed = np.zeros(count + 1)
            summed[index], summed[-1] = contributions, -host.sums
            rows.append(summed)
            bounds.append(0)
    limits = [(0, 0 if host.sums == 0 else 1) for host in hosts] + [(0, None)]
    solved = linprog(
        c=[0] * count + [1], A_ub=rows, b_ub=bounds, A_eq=[[1] * count + [0]], b_eq=[1], bounds=limits, method="highs"
    )
    assert solved.success
    return float(solved.fun)


def random_hosts(source: random.Random) -> list[Host]:
    def speed() -> float:
        return source.choice([1, 1, 1, 0.5, 0.25, 2, source.uniform(0.1, 4)])

    def sums() -> float:
        return source.choice([math.inf, math.inf, 0, source.uniform(0.5, 20)])

    workers = [Host(speed(), source.choice([1, 1, 1, 2, 8]), sums()) for _ in range(source.randint(1, 9))]
    spares = [Host(speed(), 0, sums()) for _ in range(source.randint(0, 6))]
    return [*workers, *spares]


@pytest.mark.parametrize("seed", range(20))
def test_no_shares_are_faster(seed):
    source = random.Random(seed)
    for _ in range(50):
        hosts = random_hosts(source)
        if all(host.sums == 0 for host in hosts):
            hosts[0] = Host(hosts[0].link, hosts[0].contributions)
        shares, seconds = shares_of(hosts)
        assert sum(shares) == pytest.approx(1, abs=1e-8), hosts
        assert all(share >= 0 and (share == 0 or host.sums > 0) for share, host in zip(shares, hosts, strict=True))
        assert seconds == pytest.approx(least_seconds(hosts), rel=1e-6, abs=1e-9), hosts


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
def test_equal_links_follow_the_papers_formula(workers):
    """The spare hosts' part is 2k(n - 1) / (n^2 + kn - 2k), and goodput grows linearly with their number."""
    for spares in range(workers + 1):
        shares, seconds = shares_of([Host(contributions=1)] * workers + [Host()] * spares)
        expected = 2 * spares * (workers - 1) / (workers**2 + spares * workers - 2 * spares)
        assert sum(shares[workers:]) == pytest.approx(expected, abs=1e-8)
        ring = workers / (2 * (workers - 1))
        assert 1 / seconds == pytest.approx(ring + (1 - ring) * spares / workers, rel=1e-8)


def test_links_that_differ():
    shares, seconds = shares_of([Host(1, 1), Host(1, 1), Host(1, 1), Host(0.5, 1)])
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=1e-8)
    assert seconds == pytest.approx(2)
    shares, seconds = shares_of([Host(1, 1)] * 4 + [Host(1), Host(0.25)])
    assert shares == pytest.approx([0.1486] * 4 + [0.3243, 0.0811], abs=1e-4)
    assert seconds == pytest.approx(1.2973, abs=1e-4)


def test_workers_keep_their_processors_where_the_others_suffice():
    for workers in (1, 2, 4):
        shares, _ = shares_of([Host(contributions=1)] * workers + [Host()] * workers)
        if workers > 1:  # one host alone puts nothing on its link
            assert shares[:workers] == [0] * workers
            assert shares[workers:] == pytest.approx([1 / workers] * workers)
    shares, seconds = shares_of([Host(contributions=4)])
    assert shares == [1]
    assert seconds == 0
    assert shares_of([Host(contributions=1, sums=0)] * 2)[0] == [0, 0]


def test_runs_of_a_deal_have_each_server_in_proportion():
    weights = [9830, 9830, 9830, 9830, 21626, 5308, 0]
    deal = _core.deal_slots(weights)
    assert _core.deal_slots([7, 7, 7]) == []
    for length in (1, 5, 16, 64, len(deal)):
        for first in range(0, len(deal), 7):
            run = [deal[(first + i) % len(deal)] for i in range(length)]
            for server, weight in enumerate(weights):
                due = length * weight / sum(weights)
                assert abs(run.count(server) - due) < (2 if length < len(deal) else 1), (length, first, server)

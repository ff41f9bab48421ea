# SPDX-License-Identifier: Apache-2.0
"""Two network interfaces of each host, over TCP: two namespaces that two networks join."""

import os
from collections.abc import Mapping
from typing import Any

import harness
import numpy as np
import pytest
from bodies.rails import FIRST, MEMBERS, MIB, SECOND, enter, sent, shape
from harness import network


def sums(bps: Any, namespaces: list[str], rounds: int) -> list[int]:
    """Bytes that left each interface while this rank summed `rounds` arrays of 4 MiB."""
    enter(namespaces[int(os.environ["RANK"])])
    bps.init()
    try:
        before = sent()
        for round_ in range(rounds):
            got = bps.push_pull(np.full(MIB, bps.rank() + round_, np.float32), average=False, name="x")
            assert (got == 2 * round_ + 1).all()
        bps.barrier()
        after = sent()
    finally:
        bps.shutdown()
    return [after[name] - before[name] for name in (FIRST, SECOND)]


def run(networks: network.Network, interfaces: str, rounds: int = 8, **env: str) -> list[tuple[list[int], str]]:
    """For each rank: what sums() returned, and what it has logged."""
    namespaces = [networks.namespace(member) for member in MEMBERS]
    common: Mapping[str, str] = {
        "BPS_TRANSPORT": "tcp",
        "BPS_INTERFACE": interfaces,
        "BYTEPS_PUSH_THREAD": "1",
        "BYTEPS_SERVER_ENGINE_THREAD": "1",
        "BPS_LOG_LEVEL": "info",
        "MASTER_ADDR": networks.address(MEMBERS[0], FIRST),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        **env,
    }
    with harness.start(sums, namespaces, rounds, workers=2, env=common, init=False) as job:
        found = job.results()
        return [(value, job.log(f"rank {rank}")) for rank, value in enumerate(found)]


def test_one_loop_uses_both_interfaces(networks):
    for (first, second), log in run(networks, f"{FIRST},{SECOND}"):
        assert first + second > 30 * MIB, "most of the data has gone elsewhere"
        assert min(first, second) > MIB, "an interface carried no payload"
        for interface in (FIRST, SECOND):
            assert f"TCP uses {interface} 10." in log


def test_the_order_names_the_address_of_the_host_and_nothing_else(networks):
    for (first, second), _ in run(networks, f"{SECOND},{FIRST}", BPS_TCP_STREAMS="1"):
        assert min(first, second) > MIB, "an interface carried no payload"


@pytest.mark.long  # measures
def test_equal_interfaces_carry_about_the_same(networks):
    for (first, second), _ in run(networks, f"{FIRST},{SECOND}", rounds=32):
        assert 0.25 < first / (first + second) < 0.75  # half on an idle machine


@pytest.mark.long  # measures
def test_a_slow_interface_gets_what_it_can_carry(networks):
    shape(networks, FIRST, 40)  # so slow that the processors are not what the sums wait for, even on a busy machine
    shape(networks, SECOND, 120)
    for (first, second), _ in run(networks, f"{FIRST},{SECOND}", rounds=5):
        assert 0.58 < second / (first + second) < 0.85  # .75 on an idle machine; .5 if both got the same


@pytest.mark.parametrize("only", [FIRST, SECOND])
def test_one_interface_alone(networks, only):
    for used, log in run(networks, only):
        data = dict(zip((FIRST, SECOND), used, strict=True))
        assert data.pop(only) > 30 * MIB
        assert sum(data.values()) < MIB, "the scheduler's messages at most"
        assert f"TCP uses {only} 10." in log


@pytest.mark.long
def test_a_network_that_does_not_work_is_left_out_with_a_warning(networks):
    networks.cut(MEMBERS[1], SECOND, "both")
    (used, log), (used_too, log_too) = run(networks, f"{FIRST},{SECOND}")
    for first, second in (used, used_too):
        assert first > 30 * MIB
        assert second < MIB
    for text in (log, log_too):
        assert text.count("the other rails are used") == 1
        assert "10.202.0." in text


def refused(bps: Any, namespaces: list[str]) -> str:
    enter(namespaces[0])
    try:
        bps.init()
    except bps.InvalidArgumentError as error:
        return str(error)
    bps.shutdown()
    return "nothing was refused"


def test_an_interface_that_is_not_there(networks):
    env = {"BPS_INTERFACE": f"{FIRST},nonesuch", "BPS_TRANSPORT": "tcp", "RANK": "0", "WORLD_SIZE": "1"}
    [said] = harness.run(refused, [networks.namespace(MEMBERS[0])], workers=1, env=env, init=False)
    assert "nonesuch" in said

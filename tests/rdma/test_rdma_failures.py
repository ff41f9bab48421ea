# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a peer, a wire or a device, on real verbs: the same exceptions as over tcp, and soon."""

import time
from typing import Any

import fabric
import harness
import numpy as np
import pytest
from bodies.sums import interleaved_rounds, rounds_of
from harness import mark
from levels import cases

# ---- The wire


@pytest.mark.vm
def test_a_job_over_a_cable(cable):
    """Two devices: what the next tests disturb is really on the way."""
    before = cable.packets()
    env = {"BPS_TRANSPORT": "rdma"}
    assert harness.run(rounds_of, 5, 100_000, workers=2, env=env, rank_env=cable.rank_env()) == [[], []]
    assert min(after - b for after, b in zip(cable.packets(), before, strict=True)) > 5 * 100_000 * 4 // 4096 // 2


@pytest.mark.vm
@pytest.mark.slow
def test_results_are_right_with_loss_and_delay(cable):
    cable.disturb("delay", "5ms", "loss", "1%")
    env = {"BPS_TRANSPORT": "rdma", "BPS_HEARTBEAT_TIMEOUT": "60"}
    found = harness.run(rounds_of, 12, 250_000, workers=2, env=env, rank_env=cable.rank_env(), timeout=250)
    assert found == [[], []]
    wrong = harness.run(interleaved_rounds, "plain", 10, workers=2, env=env, rank_env=cable.rank_env(), timeout=250)
    assert wrong == [0, 0]
    assert cable.dropped() > 0, "nothing was lost, so nothing was shown"


# When a heartbeat or the deadline of an operation would tell. Whatever tells sooner has another way of knowing.
LATE_S = 60 * harness.PATIENCE
LATE = {"BPS_HEARTBEAT_TIMEOUT": str(LATE_S), "BPS_TIMEOUT": str(LATE_S)}


def works_until_an_error(bps: Any) -> tuple[str, str, str, float]:
    array = np.ones(500_000, np.float32)
    try:
        for round_ in range(1_000_000):
            bps.push_pull_inplace(array, average=True, name="x")
            if round_ == 5:
                mark("working")
    except bps.BpsError as error:
        came = time.monotonic()
        bps.shutdown()
        return type(error).__name__, str(error), error.hint, came
    return "nothing", "", "", 0.0


@pytest.mark.vm
def test_a_cable_that_is_pulled(cable):
    """All packets are lost from now on; over TCP (the scheduler, on lo) everybody is alive.

    rxe sends again for longer than anybody wants to wait. It is the silence of the loops that tells, long before the
    operation's deadline or a heartbeat's.
    """
    env = {"BPS_TRANSPORT": "rdma"} | LATE
    with harness.start(works_until_an_error, workers=2, env=env, rank_env=cable.rank_env()) as job:
        job.await_marks("working")
        cable.disturb("loss", "100%")
        pulled = time.monotonic()
        found = [outcome.value for outcome in job.outcomes()]
    for rank, (kind, text, hint, came) in enumerate(found):
        assert kind == "PeerLostError", text
        # The rank that found it out names the other one; to that one the scheduler says who said so.
        assert any(f"{name} {1 - rank}" in text for name in ("worker", "server", "rank")), text
        assert hint
        assert came - pulled < LATE_S


# ---- The device


@pytest.mark.vm
@pytest.mark.parametrize("servers", cases([None], [1]))
def test_a_device_that_is_removed_under_load(spare_device, servers):
    # The scheduler is on lo and sees nothing. It is the device's own events that must tell.
    env = {"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": f"={spare_device.hca}", "BPS_SHUTDOWN_TIMEOUT": "2"} | LATE
    with harness.start(works_until_an_error, workers=2, servers=servers, env=env) as job:
        job.await_marks("working")
        removed = time.monotonic()
        fabric.command("rdma", "link", "delete", spare_device.hca)
        for outcome in job.outcomes():
            kind, text, hint, came = outcome.value
            assert kind != "nothing", text
            assert hint
            assert came - removed < LATE_S
        assert None not in job.helper_statuses().values()


def starts(bps: Any) -> tuple[str, str, str]:
    try:
        bps.init()
        bps.push_pull(np.ones(10), name="x")
        bps.shutdown()
    except bps.BpsError as error:
        return type(error).__name__, str(error), error.hint
    return "nothing", "", ""


def test_a_device_that_does_not_exist():
    env = {"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": "=nosuch9", "BPS_JOIN_TIMEOUT": "15"}
    for kind, text, hint in harness.run(starts, workers=2, env=env, init=False):
        assert kind != "nothing"
        assert "BPS_RDMA_HCA" in text
        assert hint

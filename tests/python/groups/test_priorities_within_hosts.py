# SPDX-License-Identifier: Apache-2.0
"""Ranks that sum on their host first: what is urgent overtakes on both levels, and a lost server is lost to both.

The hosts of these jobs are one machine, told apart by BPS_HOST_ID.
"""

import re
import signal
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.arrays import QUIET_S, changed, make
from bodies.hosts import SMALL_PARTITIONS, used
from bodies.losses import FAST, SOON_S
from harness import await_mark, mark

from bps_rdma.tools.trace import files

PIECES, PIECE = 1000, 8000
ONE_LOOP = harness.cut_at(PIECE) | {"BYTEPS_PUSH_THREAD": "1", "BYTEPS_SERVER_ENGINE_THREAD": "1"}
# One piece at a time from the ranks to their relay; or as many as they like, which then wait there for the server.
HELD_UP = {"ranks": {"BYTEPS_SCHEDULING_CREDIT": "1"}, "relay": {"BPS_SERVER_WINDOW": "1"}}
PRIORITIES = {"bulk": 0, "urgent": 10, "patient": -10}


def urgent_and_patient_behind_bulk(bps: Any, gathered: int) -> int:
    """Starts a large tensor, and then a more urgent and a less urgent one, while nothing of the large one is summed.

    The last rank starts when all others have. Before that, the ranks of the first host wait after the large one until
    so many pieces of it wait at each of them, as the relay.
    """
    arrays = {name: np.ones(PIECES * PIECE // 4 if name == "bulk" else 100, np.float32) for name in PRIORITIES}
    bps.declare_many(arrays)
    bps.barrier()
    if bps.rank() == 3:
        await_mark("started", 0, 1, 2)
    handles = []
    for name, array in arrays.items():
        handles.append(bps.push_pull_async(array, False, name, priority=PRIORITIES[name]))
        if bps.rank() < 2:
            harness.eventually(lambda: used(bps) >= gathered, what="that both ranks of a host push to their relay")
    mark("started")
    assert all(np.all(result == 4) for result in bps.wait(handles))
    return used(bps)


def queues(folder: Path) -> dict[tuple[Path, str, bool], dict[str, list[files.Span]]]:
    """The pieces of each tensor by the process, the member that it sends them to, and whether that is the relay."""
    found: dict[tuple[Path, str, bool], dict[str, list[files.Span]]] = {}
    for trace in files.find(folder):  # what a trace had no room for is missing, and changes no order
        for piece in trace.partitions:
            queue = found.setdefault((trace.path, piece.args["server"], piece.args["for_host"]), {})
            queue.setdefault(piece.tensor, []).append(piece)
    return found


def sent(piece: files.Span) -> float:
    return piece.stages["sent"][0]


@pytest.mark.parametrize(
    ("held_up", "servers"),
    [("ranks", 1), ("relay", 1), pytest.param("ranks", None, marks=pytest.mark.long)],
)
def test_an_urgent_tensor_overtakes_a_large_one_on_other_hosts(held_up, servers, tmp_path):
    at_relay = held_up == "relay"
    env = ONE_LOOP | HELD_UP[held_up]
    env |= {"BPS_TRACE": str(tmp_path), "BPS_PLACEMENT": "dedicated" if servers else "embedded"}
    options = {"servers": servers, "env": env, **harness.on_hosts("aabb")}
    # A relay has half of the pieces, more or less.
    host_sums = harness.run(urgent_and_patient_behind_bulk, PIECES // 3 if at_relay else 0, **options)
    assert sum(host_sums) == 2 * (PIECES + 2), "the hosts did not sum first"
    overtaken = waited_for = 0
    for (*_, for_host), queue in queues(tmp_path).items():
        bulk = queue.get("bulk", [])
        for urgent in queue.get("urgent", []):
            before = [one.name for one in bulk if urgent.begin < sent(one) < sent(urgent)]
            assert not before, "they were sent while something more urgent was in the queue"
            if for_host != at_relay:
                overtaken += sum(one.begin < urgent.begin and sent(urgent) < sent(one) for one in bulk)
        # Of a tensor for several servers over a network only a few pieces are under way. What is less urgent passes the
        # others within a host (csrc/worker/pace.h), so it has nobody to wait for.
        for patient in queue.get("patient", []) if servers == 1 else []:
            after = [one.name for one in bulk if one.begin < sent(patient) < sent(one)]
            assert not after, "they were in the queue when something less urgent was sent"
            if for_host != at_relay:
                waited_for += sum(patient.begin < sent(one) for one in bulk)
    assert overtaken > 0, "nothing waited when the urgent tensor came"
    assert waited_for > 0 or servers is None, "nothing waited when the patient tensor came"


def rounds_until_a_server_is_lost(bps: Any, memory: str) -> tuple[str, float, str]:
    """What was said of the loss, when, and what changed the array after that."""
    array = make(bps, memory, 300_000)
    for round_ in range(1_000_000):
        array.fill(bps.rank() + 1)
        try:
            bps.push_pull_inplace(array, False, "x")
        except bps.PeerLostError as error:
            text, at = str(error), time.monotonic()
            break
        if round_ == 5:
            assert sum(bps.all_gather(np.array([used(bps)]), "used")) > 0, "the hosts do not sum first"
            mark("running")
        wrong = changed(array, bps.size() * (bps.size() + 1) / 2)
        assert not wrong, (round_, wrong)
    array.fill(1000)
    mark("raised")
    await_mark("raised", *range(4))
    time.sleep(QUIET_S)
    return text, at, changed(array, 1000)


@pytest.mark.parametrize("memory", ["plain", "mapped"])
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_lost_server_is_named_on_all_hosts(memory, how):
    options = {"servers": 2, "env": SMALL_PARTITIONS | FAST, **harness.on_hosts("aabb")}
    with harness.start(rounds_until_a_server_is_lost, memory, **options) as job:
        job.await_marks("running")
        pid = job.pid("server 1")  # servers are numbered as they come
        lost = job.kill("server 1", how)
        outcomes = job.outcomes()
        left = job.helper_statuses(but=["server 1"])
    for rank, outcome in enumerate(outcomes):
        assert outcome.value, (rank, outcome)
        text, at, wrong = outcome.value
        assert re.search(rf"server \d .*pid {pid}\)", text), (rank, text)
        assert at - lost < SOON_S, (rank, text)
        assert wrong == "", (rank, wrong)
    assert None not in left.values(), f"still running: {left}"

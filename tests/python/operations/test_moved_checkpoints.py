# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what compression remembers, where other ranks encode than those that saved them: nothing is lost.

Which rank that is depends on hosts, servers and the size of partitions, which is measured by default.
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest

from bps_rdma.errors import InvalidArgumentError

COUNT = 30_000
MU = 0.5
HOW = "topk:k=0.25,feedback=1,momentum=0.5"
WITHOUT_MOMENTUM = "topk:k=0.25,feedback=1"
SECRET = {"BPS_SECRET": "0123456789abcdef"}
ROUNDS = 20  # by then everything has arrived: a quarter of a partition leaves its rank, and then its server, each time

State = dict[str, np.ndarray]


def save(bps: Any, compression: str) -> State:
    how = bps.Compression.from_text(compression)
    random = np.random.default_rng(bps.rank())
    for _ in range(3):
        bps.push_pull(random.standard_normal(COUNT).astype(np.float32), name="g", compression=how)
    return bps.feedback_state(np.empty(COUNT, np.float32), "g")


def load(bps: Any, compression: str, states: list[State]) -> tuple[np.ndarray, list[State]]:
    """What arrives when nothing more is sent than what is remembered; also after saving and loading once more."""
    zeros = np.zeros(COUNT, np.float32)
    bps.declare("g", zeros, compression=bps.Compression.from_text(compression))
    state = states[bps.rank()] if bps.rank() < len(states) else {}
    bps.load_feedback_state(zeros, "g", state)
    again = bps.feedback_state(zeros, "g")
    bps.load_feedback_state(zeros, "g", again)
    arrived = np.zeros(COUNT, np.float32)
    for _ in range(ROUNDS):
        arrived += bps.push_pull(zeros, name="g")
    return arrived, [again]


def left_of(states: list[State]) -> np.ndarray:
    """What a job of as many ranks owes its means."""
    momentum = sum(state.get("momentum", np.zeros(COUNT)) for state in states)
    owed = sum(state["residual"] for state in states) + momentum * sum(MU ** (t + 2) for t in range(ROUNDS))
    return np.asarray(owed / len(states) + states[0]["servers"])


def cut(size: int) -> dict[str, str]:
    return SECRET | harness.cut_at(size)


@pytest.mark.parametrize("compression", [HOW, WITHOUT_MOMENTUM])
@pytest.mark.parametrize(("before", "after"), [("aabb", "aabb"), ("aabb", "abab"), ("aabb", "abcd"), ("ab", "aabb")])
def test_nothing_is_lost_where_others_encode(before: str, after: str, compression: str) -> None:
    states = harness.run(save, compression, **harness.on_hosts(before), env=cut(16384))
    left = left_of(states)
    assert np.abs(left).max() > 0.1
    with harness.start(load, compression, states, **harness.on_hosts(after), env=cut(8192)) as job:
        outcomes = job.outcomes()
    for each in outcomes:
        assert each.error == "", each.error
        assert np.abs(each.value[0] - left).max() < 1e-3, np.abs(each.value[0] - left).max()
        assert "is lost" not in each.output


def test_what_nobody_has_loaded_is_told() -> None:
    states = harness.run(save, HOW, **harness.on_hosts("abc"), env=cut(16384))
    with harness.start(load, HOW, states, **harness.on_hosts("ab"), env=cut(16384)) as job:
        said = [line for each in job.outcomes() for line in each.output.splitlines() if "is lost" in line]
    assert len(said) == 1, said
    assert "remembered of 'g' is lost in part: 3 ranks have saved it" in said[0]
    assert said[0].endswith("no rank has loaded what was saved by 2")


def test_what_nothing_encodes_is_told() -> None:
    states = harness.run(save, WITHOUT_MOMENTUM, **harness.on_hosts("ab"), env=cut(16384))
    with harness.start(load, WITHOUT_MOMENTUM, states, workers=2, env=harness.cut_at(16384)) as job:
        said = [line for each in job.outcomes() for line in each.output.splitlines() if "of 'g' is lost" in line]
    assert said
    assert "nothing encodes them now" in said[0]


def doubled(bps: Any, compression: str, states: list[State]) -> np.ndarray:
    return load(bps, compression, [states[0], states[1], states[0], states[1]])[0]


def test_a_state_counts_once() -> None:
    states = harness.run(save, HOW, **harness.on_hosts("ab"), env=cut(16384))
    arrived = harness.run(doubled, HOW, states, **harness.on_hosts("aabb"), env=cut(16384))
    assert all(np.abs(each - left_of(states)).max() < 1e-3 for each in arrived)


def mixed(bps: Any, states: list[State]) -> None:
    zeros = np.zeros(COUNT, np.float32)
    bps.declare("g", zeros, compression=bps.Compression.from_text(HOW))
    with pytest.raises(InvalidArgumentError, match=r"different numbers of ranks: \[\(0, 2\), \(1, 3\)\]"):
        bps.load_feedback_state(zeros, "g", states[bps.rank()])


def test_states_of_different_jobs_are_refused() -> None:
    of_two = harness.run(save, HOW, **harness.on_hosts("ab"), env=cut(16384))
    of_three = harness.run(save, HOW, **harness.on_hosts("abc"), env=cut(16384))
    harness.run(mixed, [of_two[0], of_three[1]], **harness.on_hosts("ab"), env=cut(16384))

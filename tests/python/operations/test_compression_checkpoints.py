# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what compression remembers: a job that is started again goes on bit by bit, and nothing is lost."""

from typing import Any

import harness
import numpy as np
import pytest

from bps_rdma.errors import InvalidArgumentError, MismatchError

COUNT = 30_000  # several partitions, the last one short
SMALL = {"BYTEPS_PARTITION_BYTES": "16384", "BPS_MIN_PARTITION_BYTES": "16384", "BPS_TRANSPORT": "tcp"}

State = dict[str, np.ndarray]


def gradient(rank: int, step: int) -> np.ndarray:
    random = np.random.default_rng(1000 * step + rank)
    return (random.standard_normal(COUNT) * 10.0 ** random.integers(-3, 1, COUNT)).astype(np.float32)


def steps(
    bps: Any, compression: str, which: range, saves: int, weights: np.ndarray | None, states: list[State] | None
) -> tuple[np.ndarray, State]:
    weights = np.zeros(COUNT, np.float32) if weights is None else weights
    bps.declare("g", weights, compression=bps.Compression.from_text(compression))
    if states is not None:
        bps.load_feedback_state(weights, "g", states[bps.rank()])
    state: State = {}
    for step in which:
        if step == saves:
            state = bps.feedback_state(weights, "g")
        weights = weights - np.float32(0.1) * bps.push_pull(gradient(bps.rank(), step), name="g")
    if saves == which.stop:
        state = bps.feedback_state(weights, "g")
    return weights, state


LAYOUTS: dict[str, dict[str, Any]] = {
    "dedicated servers": {"workers": 2, "servers": 2},
    "two hosts": harness.on_hosts("ab"),
    "two and two": harness.on_hosts("aabb"),
}


INT4, TOPK = "int4:feedback=1", "topk:k=0.01,feedback=1,momentum=0.9"


@pytest.mark.parametrize(
    ("layout", "compression"),
    [
        ("dedicated servers", TOPK),
        ("two and two", INT4),
        pytest.param("dedicated servers", INT4, marks=pytest.mark.long),
        pytest.param("two and two", TOPK, marks=pytest.mark.long),
        pytest.param("two hosts", INT4, marks=pytest.mark.long),
        pytest.param("two hosts", TOPK, marks=pytest.mark.long),
    ],
)
def test_a_job_goes_on_bit_by_bit(layout: str, compression: str) -> None:
    where = LAYOUTS[layout] | {"env": SMALL}
    if "servers" in where:
        compression += ",everywhere=1"
    whole = harness.run(steps, compression, range(20), -1, None, None, **where)
    first = harness.run(steps, compression, range(10), 10, None, None, **where)
    weights, states = first[0][0], [state for _, state in first]
    assert all(state["servers"].tobytes() == states[0]["servers"].tobytes() for state in states)
    assert any(state["residual"].any() for state in states)
    assert states[0]["servers"].any()
    second = harness.run(steps, compression, range(10, 20), -1, weights, states, **where)
    assert {one.tobytes() for one, _ in second} == {one.tobytes() for one, _ in whole}
    # Saving changed nothing, and what was saved was needed: all of it.
    saving = harness.run(steps, compression, range(20), 10, None, None, **where)
    assert saving[0][0].tobytes() == whole[0][0].tobytes()
    for missing in set(states[0]) - {"saved_by"}:
        less = [{key: value for key, value in state.items() if key != missing} for state in states]
        other = harness.run(steps, compression, range(10, 20), -1, weights, less, **where)
        assert other[0][0].tobytes() != whole[0][0].tobytes(), missing


def conserved(bps: Any) -> None:
    """What has not arrived is in the state: on the ranks or on the servers."""
    sent, arrived = np.zeros(COUNT), np.zeros(COUNT)
    for step in range(5):
        for rank in range(bps.size()):
            sent += gradient(rank, step)
        mine = gradient(bps.rank(), step)
        arrived += bps.push_pull(mine, average=False, name="g", compression=bps.OneBit(feedback=True, everywhere=True))
    state = bps.feedback_state(mine, "g")
    assert np.abs(sent - arrived).max() > 1
    left = bps.push_pull(state["residual"], average=False, name="left") + state["servers"]
    assert np.abs(sent - arrived - left).max() < 1e-3


def test_nothing_is_lost() -> None:
    harness.run(conserved, workers=2, servers=1, env=SMALL)
    harness.run(conserved, **harness.on_hosts("aab"), env=SMALL)


@harness.on_ranks(**harness.on_hosts("ab"), env=SMALL)
def test_bad_input_is_refused(bps: Any) -> None:
    array = np.ones(COUNT, np.float32)
    bps.push_pull(array, name="plain")
    with pytest.raises(InvalidArgumentError, match="not compressed"):
        bps.feedback_state(array, "plain")
    bps.push_pull(array, name="forgetful", compression=bps.Int8())
    assert bps.feedback_state(array, "forgetful") == {}
    bps.declare("g", array, compression=bps.Int8(feedback=True))
    state = bps.feedback_state(array, "g")
    assert set(state) == {"residual", "servers", "saved_by"}
    assert state.pop("saved_by").tolist() == [bps.rank(), 2]
    assert not any(value.any() for value in state.values())
    with pytest.raises(InvalidArgumentError, match="30000"):
        bps.load_feedback_state(array, "g", {"residual": array[:10]})
    with pytest.raises(InvalidArgumentError, match="'other'"):
        bps.load_feedback_state(array, "g", {"other": array})
    with pytest.raises(InvalidArgumentError, match="no momentum"):
        bps.load_feedback_state(array, "g", {"momentum": array})
    bps.reduce_scatter(array, name="s", compression=bps.Int8(feedback=True))
    with pytest.raises(InvalidArgumentError, match="another kind"):
        bps.feedback_state(array, "s")
    bps.barrier()  # none leaves while another one still calls


@harness.on_ranks(workers=2, servers=1, env=SMALL)
def test_ranks_must_agree(bps: Any) -> None:
    array = np.ones(COUNT, np.float32)
    bps.declare("g", array, compression=bps.Int8(feedback=True))
    with pytest.raises(MismatchError):
        bps.feedback_state(array, "g") if bps.rank() == 0 else bps.push_pull(array, name="g")
    bps.barrier()  # a rank that leaves would be the reason for the other one

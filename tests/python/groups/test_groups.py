# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, and jobs beside and after one another: nobody hears what is not meant for them."""

import re
from typing import Any

import harness
import numpy as np
import pytest
from bodies.groups import COUNT, collectives_in_a_group, disjoint_groups, overlapping_groups


def total(bps: Any, value: float, name: str, group: Any = None, average: bool = False) -> float:
    """Sum of `value` over the group; checks that all elements agree."""
    result = bps.push_pull(np.full(COUNT, value, np.float32), average, name, group=group)
    assert np.all(result == result[0])
    return float(result[0])


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (None, "tcp"), (2, "shm"), (2, "tcp")])
def test_disjoint_groups_with_equal_names(servers, transport):
    harness.run(disjoint_groups, workers=4, servers=servers, env={"BPS_TRANSPORT": transport})


def test_overlapping_groups_in_different_orders(transport):
    harness.run(overlapping_groups, workers=3, env={"BPS_TRANSPORT": transport})


@pytest.mark.parametrize(("servers", "transport"), [(None, "shm"), (2, "tcp")])
def test_collectives_in_a_group(servers, transport):
    harness.run(collectives_in_a_group, workers=4, servers=servers, env={"BPS_TRANSPORT": transport})


def identity_of_groups(bps: Any) -> list[int]:
    first = bps.new_group([0, 1])
    assert bps.new_group([1, 0]) == first, "order does not matter"
    assert bps.new_group((0, 1)) == first
    named = bps.new_group([0, 1], "other")
    assert named != first
    assert total(bps, 1, "w", first) == total(bps, 1, "w", named) == 2
    return [first.id, named.id]


def test_the_same_ranks_and_name_are_the_same_group():
    ids = harness.run(identity_of_groups, workers=2)
    assert ids[0] == ids[1]
    assert 0 not in ids[0]


def test_a_group_that_changes_is_found_again():
    """As it does in a new view: what a program keeps under it must not be lost."""
    import bps_rdma

    group = bps_rdma.Group(1, (0, 1, 2))
    kept = {group: "x"}
    group._become(bps_rdma.Group(2, (0, 1)))
    assert kept[group] == kept[bps_rdma.Group(2, (0, 1))] == "x"
    assert bps_rdma.Group(1, (0, 1, 2)) not in kept


def not_a_member(bps: Any) -> list[str]:
    hints = []

    def expect(text: str, call: Any) -> None:
        with pytest.raises(bps.InvalidArgumentError, match=re.escape(text)) as raised:
            call()
        hints.append(raised.value.hint)

    if bps.rank() == 0:
        expect("rank 0 is not in the group [1]", lambda: bps.new_group([1]))
        expect("[0, 2]", lambda: bps.new_group([0, 2]))
        expect("[-1, 0]", lambda: bps.new_group([0, -1]))
        expect("[]", lambda: bps.new_group([]))
        # What another rank made, as if it had come here by pickle.
        foreign = bps.Group(1, (1,))
        expect("not a group of this job", lambda: bps.barrier(foreign))
        expect("not a group of this job", lambda: bps.push_pull(np.ones(3), group=foreign))
    else:
        bps.new_group([1])
    assert total(bps, 1, "still works") == 2
    return hints


def test_ranks_that_are_no_members():
    hints = harness.run(not_a_member, workers=2)[0]
    assert len(hints) == 6
    assert all(hints)


def nobody_else_comes(bps: Any) -> str:
    if bps.rank() == 2:
        bps.barrier(timeout=60)
        return ""
    try:
        bps.new_group([0, 1, 2], "lonely")
    except bps.DeadlineError as error:
        bps.barrier(timeout=60)
        return f"{error} {error.hint}"
    return "nothing was raised"


def test_a_group_that_a_member_does_not_make():
    for text in harness.run(nobody_else_comes, workers=3, env={"BPS_TIMEOUT": "2"})[:2]:
        assert "lonely" in text
        assert "2 did not ask for it" in text  # and perhaps a rank that has given up by then


def keeps_adding(bps: Any, base: float, rounds: int) -> float:
    found = {total(bps, base + bps.rank() + round_, "w") - 2 * round_ for round_ in range(rounds)}
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.parametrize("servers", [None, 1])
def test_two_jobs_at_once(servers):
    with (
        harness.start(keeps_adding, 100.0, 500, workers=2, servers=servers) as first,
        harness.start(keeps_adding, 5000.0, 500, workers=2, servers=servers) as second,
    ):
        assert first.results() == [201.0, 201.0]
        assert second.results() == [10001.0, 10001.0]


def test_two_jobs_at_once_that_differ_only_by_their_port():
    """What two plain torchruns on one host look like: no job id, no secret."""
    bare = {"BPS_JOB_ID": "", "BPS_SECRET": ""}
    with (
        harness.start(keeps_adding, 100.0, 300, workers=2, env=bare) as first,
        harness.start(keeps_adding, 5000.0, 300, workers=2, env=bare) as second,
    ):
        assert first.results() == [201.0, 201.0]
        assert second.results() == [10001.0, 10001.0]


@pytest.mark.parametrize("servers", [None, 2])
def test_a_second_job_on_the_same_port_right_after_the_first(servers):
    port = harness.free_port()
    env = {"BPS_ROOT_PORT": str(port)}
    for base in (10.0, 20.0, 30.0, 40.0):
        found = harness.run(keeps_adding, base, 5, workers=2, servers=servers, env=env, port=port)
        assert found == [2 * base + 1] * 2

# SPDX-License-Identifier: Apache-2.0
"""What becomes of interrupted operations follows from the reports of all ranks, and is never half of a result."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bps_rdma.failover import Continuation, Gift, Name, RankReport, can_go_on, plan

NAME: Name = ("world", "gradient")
WORLD = {"world": (0, 1, 2)}


def reports(*ranks: tuple[int, dict[int, set[int]]]) -> list[RankReport]:
    """One for each rank: the round it has not begun, and what is missing of the rounds that were interrupted."""
    return [
        RankReport(
            1,
            {NAME: following},
            {(NAME, number): dict.fromkeys(left, 0) for number, left in missing.items()},
            groups=WORLD,
        )
        for following, missing in ranks
    ]


def of_round_3(*ranks: tuple[dict[int, int], set[int]]) -> list[RankReport]:
    """One for each rank: how much it has of the partitions that it lacks a part of, and which it has."""
    return [
        RankReport(1, {NAME: 4}, {(NAME, 3): missing}, {(NAME, 3): frozenset(whole)}, groups=WORLD)
        for missing, whole in ranks
    ]


def test_what_nobody_lacks_is_taken():
    made = plan(reports((4, {3: set()}), (4, {}), (4, {3: set()})))
    assert made == Continuation({NAME: 4}, frozenset(), {}, {(NAME, 3): []}, {}, frozenset())


def test_what_somebody_lacks_is_summed_again_by_all():
    made = plan(reports((4, {3: {1, 2}}), (4, {3: set()}), (4, {3: {2, 5}})))
    assert made.repeated == {(NAME, 3): [1, 2, 5]}
    assert made.first == {NAME: 4}


def test_what_one_has_is_given_to_the_others_and_not_summed_again():
    made = plan(of_round_3(({1: 0, 2: 512}, set()), ({2: 0}, {1}), ({1: 64}, {2})))
    assert made.given == {(NAME, 3): {1: Gift(1, None), 2: Gift(2, None)}}
    assert made.repeated == {(NAME, 3): []}


def test_of_what_nobody_has_all_of_the_most_is_given_and_the_rest_summed_again():
    made = plan(of_round_3(({1: 64, 2: 128}, set()), ({1: 192, 2: 128}, set()), ({1: 0, 2: 128}, set())))
    assert made.given == {(NAME, 3): {1: Gift(1, 192)}}, "of partition 2 all have equally much"
    assert made.repeated == {(NAME, 3): [1, 2]}


def test_one_who_does_not_want_a_partition_neither_gives_nor_lacks():
    made = plan(of_round_3(({1: 64}, set()), ({}, set()), ({}, set())))
    assert made.given == {}
    assert made.repeated == {(NAME, 3): [1]}


def test_what_somebody_has_not_begun_is_started_again_by_the_others():
    made = plan(reports((5, {3: {0}, 4: {0, 1}}), (4, {3: {0}}), (5, {3: {0}, 4: {0, 1}})))
    assert made.again == {(NAME, 4)}
    assert made.repeated == {(NAME, 3): [0]}
    assert made.first == {NAME: 4}, "round 4 is round 0 of the next view"


def test_what_somebody_has_given_up_is_aborted_for_all():
    made = plan(reports((4, {3: {0}}), (4, {}), (4, {3: {0}})))
    assert made.aborted == {(NAME, 3)}
    assert not made.repeated


def test_a_name_that_a_member_never_used_begins_with_its_first_round():
    first, second, third = reports((2, {0: {0}, 1: {0}}), (2, {0: {0}, 1: {0}}), (0, {}))
    made = plan([first, second, RankReport(1, groups=third.groups)])
    assert made.first == {NAME: 0}
    assert made.again == {(NAME, 0), (NAME, 1)}


def test_only_the_members_of_a_group_count():
    name: Name = ("00000001.00000003", "of the group")
    groups = WORLD | {name[0]: (0, 2)}
    made = plan(
        [
            RankReport(1, {name: 7}, {(name, 6): {0: 0}}, groups=groups),
            RankReport(1, groups=WORLD),
            RankReport(1, {name: 7}, {(name, 6): {}}, groups=groups),
        ]
    )
    assert made.first == {name: 7}
    assert made.repeated == {(name, 6): [0]}


def test_a_report_travels_as_bytes():
    for each in reports((4, {3: {1, 2}}), (0, {}), (70_000, {69_999: set()})):
        full = replace(each, since=3, late={(NAME, 3): "too late"}, failed={(NAME, 2): "too late, before"})
        assert RankReport.decode(full.encode()) == full
    for each in of_round_3(({1: 64, 3: 1 << 40}, {2, 5}), ({}, set())):
        assert RankReport.decode(each.encode()) == each


def test_what_is_late_on_one_rank_fails_on_all():
    first, *others = reports((4, {3: {0}}), (4, {3: {0}}), (4, {3: set()}))
    made = plan([replace(first, late={(NAME, 3): "not complete within 1 s"}), *others])
    assert made.failed == {(NAME, 3): "not complete within 1 s"}
    assert not made.repeated
    assert not made.aborted


def test_what_is_late_and_complete_everywhere_is_complete():
    first, *others = reports((4, {3: set()}), (4, {}), (4, {3: set()}))
    made = plan([replace(first, late={(NAME, 3): "not complete within 1 s"}), *others])
    assert not made.failed
    assert made.repeated == {(NAME, 3): []}


def test_what_is_late_is_not_started_again():
    first, *others = reports((4, {3: {0}}), (3, {}), (4, {3: {0}}))
    made = plan([replace(first, late={(NAME, 3): "not complete within 1 s"}), *others])
    assert set(made.failed) == {(NAME, 3)}
    assert not made.again


def test_what_has_failed_on_one_rank_fails_on_all_even_where_its_result_has_landed():
    first, *others = reports((4, {}), (4, {3: set()}), (4, {3: set()}))
    made = plan([replace(first, failed={(NAME, 3): "not complete within 1 s"}), *others])
    assert set(made.failed) == {(NAME, 3)}
    assert not made.repeated


def test_ranks_go_on_together_or_not_at_all():
    old = RankReport(1)
    assert can_go_on([old, old], 2)
    assert can_go_on([old, old], 3), "a view between, in which all went on"
    assert not can_go_on([RankReport(3), old], 3), "one has entered, or has missed a view with other workers"
    assert not can_go_on([RankReport(2), old], 3), "one was in such a view"
    assert not can_go_on([RankReport(3), RankReport(3)], 3)


LENGTH = 8  # of a partition, in elements
COMMITTED = LENGTH + 1  # it has all of it, and its caller knows


@st.composite
def partition(draw: st.DrawFn) -> list[int]:
    """How much of the result of a partition has come over the input of each of three ranks when the server is lost.

    The server commits when all have said that their answer has landed, and tells them one after the other.
    """
    kind = draw(st.sampled_from(["early", "landing", "committing"]))
    states = {"early": [0], "landing": list(range(LENGTH + 1)), "committing": [LENGTH, COMMITTED]}[kind]
    return [draw(st.sampled_from(states)) for _ in range(3)]


@given(st.lists(partition(), min_size=1, max_size=6), st.booleans())
def test_no_input_that_is_gone_is_asked_for(partitions, one_has_not_begun):
    """Each element is given by a rank that has it, or summed again from inputs that all ranks have."""
    if one_has_not_begun:
        partitions = [[0] * 3 for _ in partitions]
    ranks = []
    for rank in range(3):
        states = [states[rank] for states in partitions]
        if one_has_not_begun and rank == 2:
            ranks.append((3, {}))
        elif all(state == COMMITTED for state in states):
            ranks.append((4, {}))  # the operation is complete, and its memory the caller's
        else:
            ranks.append((4, {3: {i for i, state in enumerate(states) if state < LENGTH}}))
    told = reports(*ranks)
    for rank, report in enumerate(told):
        for which, missing in report.missing.items():
            have = {number: partitions[number][rank] for number in missing}
            whole = frozenset(number for number, states in enumerate(partitions) if states[rank] == LENGTH)
            told[rank] = replace(report, missing={which: have}, whole={which: whole})
    made = plan(told)
    assert not made.aborted
    if one_has_not_begun:
        assert made.again == {(NAME, 3)}
        return
    again = set(made.repeated.get((NAME, 3), []))
    gifts = made.given.get((NAME, 3), {})
    for number, states in enumerate(partitions):
        gift = gifts.get(number)
        known = 0 if gift is None else LENGTH if gift.size is None else gift.size
        if gift is not None:
            assert states[gift.rank] >= known, "it has what it gives"
        have = [max(min(state, LENGTH), known) for state in states]
        if number in again:
            assert have == [have[0]] * 3, "all sum from the same element on, of which all have the input"
            assert COMMITTED not in states
        else:
            assert have == [LENGTH] * 3

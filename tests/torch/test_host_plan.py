# SPDX-License-Identifier: Apache-2.0
"""Which ranks sum or gather what, where GPUs of a host begin among themselves: a function of where they compute."""

import pytest

from bps_rdma.torch.transfer.hosts.plan import Plan, Where, plan_for


def where(layout: str) -> list[Where]:
    return [Where(host.encode(), f"{rank}".encode()) for rank, host in enumerate(layout)]


@pytest.mark.parametrize(
    ("layout", "slices", "owners"),
    [
        ("aabb", 2, [[(0, 2)], [(1, 3)], [(0, 2)], [(1, 3)]]),
        ("abab", 2, [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]),
        ("aab", 2, [[(0, 2)], [(1, 2)], [(0, 2), (1, 2)]]),
        ("aaaabb", 4, [[(0, 4)], [(1, 4)], [(2, 5)], [(3, 5)], [(0, 4), (1, 4)], [(2, 5), (3, 5)]]),
        ("aaabb", 6, [[(0, 3)] * 2, [(1, 3), (1, 4)], [(2, 4)] * 2, [(0, 3)] * 2 + [(1, 3)], [(1, 4)] + [(2, 4)] * 2]),
        ("aa", 2, [[(0,)], [(1,)]]),
    ],
)
def test_who_sums_what(layout, slices, owners):
    ranks = range(len(layout))
    plans = [plan_for(rank, ranks, where(layout)) for rank in ranks]
    assert all(isinstance(plan, Plan) and plan.slices == slices for plan in plans)
    assert [list(plan.owners) for plan in plans] == owners
    for plan in plans:
        for number, who in enumerate(plan.owners, plan.first):
            for other in who:  # they agree on each slice
                assert plans[other].owners[number - plans[other].first] == who


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (where("abc"), "no two of its ranks are on one host"),
        ([*where("aa"), Where(b"b", b"\0\0")], "no NCCL"),
        ([Where(b"a", b"x"), Where(b"a", b"x")], "share a GPU"),
        (where("a" * 13 + "b" * 11), "11, 13 ranks, which would take 143 slices"),
    ],
)
def test_why_there_is_no_plan(found, reason):
    for rank in range(len(found)):
        assert reason in plan_for(rank, range(len(found)), found)


@pytest.mark.parametrize(
    ("layout", "by_place"),
    [
        ("aabb", (0, 2, 1, 3)), ("abab", (0, 1, 2, 3)), ("abba", (0, 1, 2, 3)), ("aaabbb", (0, 3, 1, 4, 2, 5)),
        ("aa", (0, 1)), ("aab", None), ("aaabb", None),
    ],
)  # fmt: skip
def test_whose_parts_a_rank_has(layout, by_place):
    """Those of its place on all hosts: by_place has them one after the other, and the plan of each rank its own."""
    ranks = range(len(layout))
    plans = [plan_for(rank, ranks, where(layout)) for rank in ranks]
    for rank, plan in enumerate(plans):
        assert isinstance(plan, Plan)
        assert plan.is_even == (by_place is not None)
        for other in ranks:
            sends = plan.owners_beside(other)
            assert all(layout[owner] == layout[other] for owner in sends)
            assert all(owner in owners for owner, owners in zip(sends, plan.owners, strict=True))
        if by_place is not None:
            assert plan.by_place == by_place
            count = len(plan.hosts)
            place = plan.peers.index(rank)
            assert plan.owners == (by_place[place * count : (place + 1) * count],)

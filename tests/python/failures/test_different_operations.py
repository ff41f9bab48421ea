# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different operations under one name are told so, and not only at their deadlines."""

from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark, on_hosts

ELEMENTS = 1000  # one partition, or one for each rank: the pushes of larger tensors meet by chance


def call(bps: Any, operation: str, group: Any = None) -> None:
    members = bps.size() if group is None else group.size
    array = np.ones(ELEMENTS // members if operation == "all_gather" else ELEMENTS, np.float32)
    getattr(bps, operation)(array, name="x", group=group)


def differ(bps: Any, calls: list[str]) -> list[tuple[str, str]]:
    """Each rank makes its own call, the first ones in a group of their own if there are more ranks than calls."""
    rank, found = bps.rank(), []
    if rank >= len(calls):
        return []
    group = bps.new_group(range(len(calls)), "some") if len(calls) < bps.size() else None
    for _ in range(2):  # the round after one that has failed is a round like any
        try:
            call(bps, calls[rank], group)
            found.append(("nothing", ""))
        except bps.BpsError as error:
            found.append((type(error).__name__, str(error)))
        sums = bps.push_pull(np.ones(5), average=False, name="other", group=group)
        assert sums.tolist() == [len(calls)] * 5
    bps.push_pull(np.ones(ELEMENTS, np.float32), name="x", group=group)
    return found


@pytest.mark.parametrize(
    ("calls", "options"),
    [
        pytest.param(["push_pull", "reduce_scatter"], {"workers": 2}, id="cut in two ways"),
        pytest.param(["broadcast", "all_gather"], {"workers": 2, "env": {"BPS_PUSH_THREAD": "2"}}, id="several loops"),
        pytest.param(["reduce_scatter", "all_gather"], {"workers": 2}, id="cut in one way"),
        pytest.param(["push_pull", "all_gather"], {"workers": 3}, id="group"),
        pytest.param(["push_pull", "push_pull", "reduce_scatter"], on_hosts("aab"), id="hosts"),
    ],
)
def test_ranks_that_call_different_operations(calls, options):
    for round_errors in harness.run(differ, calls, **options)[: len(calls)]:
        assert [kind for kind, _ in round_errors] == ["MismatchError"] * 2, round_errors
        for number, (_, text) in enumerate(round_errors):
            assert f"of 'x', round {number}: " in text
            assert f"ranks disagree in round {number}: rank " in text
            assert f" called {calls[0]}, and rank " in text
            assert text.index(f"called {calls[0]}") < text.index(f"called {calls[-1]}")


@harness.on_ranks(workers=3)
def test_a_rank_that_comes_to_such_a_round_later_is_told_as_well(bps: Any) -> None:
    if bps.rank() == 2:
        await_mark("told", 0, 1)
    with pytest.raises(bps.MismatchError, match="rank 0 called push_pull, and rank 1 called reduce_scatter"):
        call(bps, "push_pull" if bps.rank() == 0 else "reduce_scatter")
    mark("told")
    await_mark("told", 0, 1, 2)  # a rank that leaves fails the round as well

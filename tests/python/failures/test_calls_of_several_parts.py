# SPDX-License-Identifier: Apache-2.0
"""A call that consists of several operations takes part in all of them or in none, also where it raises something.

Ranks match the operations of one name by their order. A rank that left some of them out would be one behind with these
from then on, and results would mix what ranks have given in different calls, in silence.
"""

import contextlib
import pkgutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import harness
import numpy as np
import pytest

ROUNDS = (20, 30, 40, 50)


class SignalError(Exception):
    """What a signal handler raises."""


@contextlib.contextmanager
def interrupted_at(place: int, path: str, *, after: bool) -> Iterator[None]:
    """Raises SignalError in the call of this function with this number, or after it; once."""
    function, calls = pkgutil.resolve_name(path), iter(range(1000))

    def call(*args: Any) -> Any:
        is_it = next(calls) == place
        if is_it and not after:
            raise SignalError
        found = function(*args)
        if is_it:
            raise SignalError
        return found

    with mock.patch(path, call):
        yield


class Sums:
    """push_pull_many(): the sums of a round, of several arrays."""

    started_by = "bps_rdma.operations.start.run"

    def call(self, bps: Any, value: int) -> Any:
        arrays = {f"{number}": np.full(5000, value + bps.rank() + number) for number in range(4)}
        return bps.push_pull_many(arrays, "many", average=False)

    def check(self, bps: Any, value: int, found: Any) -> None:
        for number in range(4):
            assert np.all(found[f"{number}"] == 3 * (value + number) + 3), (value, number, found[f"{number}"][0])


class Exchange:
    """all_to_all(): what all ranks give each other in a round.

    Args:
        count: elements for each rank.
    """

    started_by = "bps_rdma.operations.exchanges.Message"

    def __init__(self, count: int) -> None:
        self._count = count

    def call(self, bps: Any, value: int) -> Any:
        return bps.all_to_all(np.repeat(100 * value + 10 * bps.rank() + np.arange(3), self._count), "all")

    def check(self, bps: Any, value: int, found: Any) -> None:
        assert np.array_equal(found, np.repeat(100 * value + 10 * np.arange(3) + bps.rank(), self._count)), value


class Gather:
    """all_gather() of parts of different sizes.

    Args:
        started_by: the function that is called for the sizes, or for the parts.
    """

    def __init__(self, started_by: str) -> None:
        self.started_by = f"bps_rdma.operations.start.{started_by}"

    def call(self, bps: Any, value: int, **how: Any) -> Any:
        return bps.all_gather(np.full(1000 * (1 + bps.rank()), 10 * value + bps.rank()), "uneven", uneven=True, **how)

    def check(self, bps: Any, value: int, found: Any) -> None:
        assert np.array_equal(found, np.repeat(10 * value + np.arange(3), [1000, 2000, 3000])), (value, set(found))


class Exact:
    """ExactSum.push_pull() of numbers that no float64 holds, which exchanges digits behind the sums.

    Args:
        step: the method that is interrupted.
    """

    def __init__(self, step: str) -> None:
        self.started_by = f"bps_rdma.exact.UnroundedSums.{step}"

    def call(self, bps: Any, value: int) -> Any:
        sums = bps.ExactSum(np.zeros(3), "exact")
        for one in (float(value), 1e300, 1e-300, [-1e300, -1e300, np.inf]):
            sums.add(np.full(3, one))
        return sums.push_pull()

    def check(self, bps: Any, value: int, found: Any) -> None:
        assert found.tolist() == [3 * value, 3 * value, np.inf], (value, found)


PARTS = [(0, True), (1, False), (1, True)]


@pytest.mark.parametrize(
    ("kind", "place", "after"),
    [
        *(pytest.param(Sums(), *part, id=f"sums {part}") for part in PARTS),
        *(pytest.param(Exchange(3), *part, id=f"small messages {part}") for part in PARTS),
        *(pytest.param(Exchange(500), *part, id=f"large messages {part}") for part in PARTS),
        pytest.param(Exact("_wait_for_step"), 0, False, id="exact sums, not complete"),
        *(pytest.param(Exact("_wait_for_step"), place, True, id=f"exact sums, step {place}") for place in range(3)),
        pytest.param(Gather("all_gather"), 0, True, id="sizes"),
        *(pytest.param(Gather("broadcast"), *part, id=f"parts {part}") for part in [(0, False), *PARTS]),
    ],
)
@harness.on_ranks(workers=3, env={"BPS_TIMEOUT": str(20 * harness.PATIENCE)})
def test_who_is_interrupted_between_the_parts_of_a_call(bps: Any, kind: Any, place: int, after: bool) -> None:
    """Rank 0 is interrupted between the parts of a call; the others take part in it, and may be told."""
    told: tuple[type[BaseException], ...] = (bps.PeerLostError, bps.MismatchError)
    for value in (1, 2):
        kind.check(bps, value, kind.call(bps, value))
    if bps.rank() == 0:
        with interrupted_at(place, kind.started_by, after=after), pytest.raises(SignalError):
            kind.call(bps, 3)
    else:
        with contextlib.suppress(*told):
            kind.check(bps, 3, kind.call(bps, 3))
    for value in ROUNDS:
        kind.check(bps, value, kind.call(bps, value))


@pytest.mark.parametrize("count", [1, 6001])
@harness.on_ranks(workers=3)
def test_where_one_rank_has_no_place_for_what_all_gather(bps: Any, count: int) -> None:
    """It is told so; the others get everything, and the next calls are right on all ranks."""
    kind = Gather("all_gather")
    kind.check(bps, 1, kind.call(bps, 1))
    if bps.rank() == 0:
        with pytest.raises(bps.InvalidTensorError, match="and the parts together 6000 of int64"):
            kind.call(bps, 2, out=np.empty(count, np.int64))
    else:
        kind.check(bps, 2, kind.call(bps, 2))
    for value in ROUNDS:
        kind.check(bps, value, kind.call(bps, value))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@harness.on_ranks("transport", workers=3)
def test_gathers_of_one_name_under_way_keep_their_order(bps: Any) -> None:
    """The sizes of the second one have a higher priority, and often come first."""
    kind = Gather("all_gather")
    for value in range(0, 100, 2):
        handles = [
            bps.all_gather_async(
                np.full(1000 * (1 + bps.rank()), 10 * (value + number) + bps.rank()),
                "uneven",
                uneven=True,
                priority=number,
            )
            for number in range(2)
        ]
        for number, handle in enumerate(handles):
            kind.check(bps, value + number, handle.wait())

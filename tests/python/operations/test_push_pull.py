# SPDX-License-Identifier: Apache-2.0
"""push_pull gives the right numbers: every dtype, number of members, transport and kind of memory."""

from typing import Any

import harness
import numpy as np
import pytest
from bodies.sums import averages, in_place_and_not, interleaved_rounds

from bps_rdma import _core

STAGING = {"BPS_SHM_CMA": "0"}


TOPOLOGIES = [
    (1, None, "auto", "plain", {}),
    (2, None, "auto", "plain", {}),
    (2, None, "shm", "empty", {}),
    (2, None, "shm", "plain", STAGING),
    (2, None, "tcp", "plain", {}),
    (3, None, "tcp", "empty", {}),
    (4, None, "auto", "plain", {}),
    (1, 1, "tcp", "plain", {}),
    (1, 3, "shm", "plain", STAGING),
    (2, 1, "tcp", "plain", {}),
    (2, 2, "shm", "empty", {}),
    (2, 3, "auto", "plain", {}),
    (3, 1, "shm", "plain", STAGING),
    (3, 2, "tcp", "empty", {"BPS_TCP_STREAMS": "1"}),
    (3, 3, "auto", "empty", {}),
    (4, 1, "auto", "plain", {}),
    (4, 3, "tcp", "plain", {}),
]


@pytest.mark.parametrize(("workers", "servers", "transport", "memory", "env"), TOPOLOGIES)
def test_a_hundred_rounds_of_ten_names(workers, servers, transport, memory, env):
    env = {"BPS_TRANSPORT": transport, **env}
    wrong = harness.run(interleaved_rounds, memory, 100, workers=workers, servers=servers, env=env)
    assert wrong == [0] * workers


# What only many rounds show (numbers that wrap, slots that leak) depends little on the topology: one with embedded
# servers and shared memory, one with dedicated servers and TCP; `ci/test --all` takes the others as well.
THOUSAND = [TOPOLOGIES[2], TOPOLOGIES[9]]


@pytest.mark.parametrize(
    ("workers", "servers", "transport", "memory", "env"),
    [pytest.param(*one, marks=[] if one in THOUSAND else pytest.mark.long) for one in TOPOLOGIES],
)
def test_a_thousand_rounds_of_ten_names(workers, servers, transport, memory, env):
    env = {"BPS_TRANSPORT": transport, **env}
    wrong = harness.run(interleaved_rounds, memory, workers=workers, servers=servers, env=env)
    assert wrong == [0] * workers


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_average_is_sum_over_group_size(workers, transport):
    results = harness.run(averages, transport, workers=workers, env={"BPS_TRANSPORT": transport})
    assert results == [[]] * workers


@harness.on_ranks(workers=2)
def test_integers_are_floor_divided(bps: Any) -> None:
    # Sums of -7, -1, 1 and 8 over two ranks: truncation would give -3, 0, 0, 4.
    mine = ([-3, -1, 1, 5], [-4, 0, 0, 3])[bps.rank()]
    for dtype in ("int8", "int32", "int64"):
        assert bps.push_pull(np.array(mine, dtype), average=True, name=dtype).tolist() == [-4, -1, 0, 4]


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("workers", [2, 3])
@harness.on_ranks("workers", "servers", "transport")
def test_means_of_integers_do_not_wrap_around(bps: Any) -> None:
    """Sums of these do not fit their type, means do."""
    for dtype in ("uint8", "int8", "int32", "int64"):
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        columns = ([most, least, most, least + 1], [most, least, least, least], [most, least, most - 1, least])
        values = np.array(columns, dtype)
        expected = [sum(int(row[i]) for row in values[: bps.size()]) // bps.size() for i in range(4)]
        mine = np.tile(values[bps.rank()], 600)
        for name, mean in {
            "push_pull": bps.push_pull(mine, average=True, name=dtype),
            "reduce_scatter": bps.all_gather(
                bps.reduce_scatter(mine, average=True, name=f"{dtype}.part"), name=f"{dtype}.all"
            ),
        }.items():
            assert mean.tolist() == expected * 600, f"{name} of {dtype}"


@pytest.mark.parametrize("servers", [None, 1])
@harness.on_ranks("servers", workers=3)
def test_float16_is_summed_in_float32(bps: Any) -> None:
    # 2048 + 1 is 2048 in float16, so pairwise sums lose both ones; 60000 + 60000 is infinite there.
    mine = np.array(([2048, 60000], [1, 60000], [1, 60000])[bps.rank()], np.float16)
    assert bps.push_pull(mine[:1], average=False, name="sum")[0] == 2050
    assert bps.push_pull(mine[1:], average=True, name="mean")[0] == 60000


@harness.on_ranks(workers=3)
def test_float16_is_rounded_once(bps: Any) -> None:
    values = [np.random.default_rng(seed).standard_normal(5001).astype(np.float16) for seed in range(3)]
    exact = np.zeros(5001, np.float32)
    for one in values:
        exact += one.astype(np.float32)
    total = bps.push_pull(values[bps.rank()], average=False, name="sum")
    mean = bps.push_pull(values[bps.rank()], average=True, name="mean")
    assert np.array_equal(total, exact.astype(np.float16))
    assert np.array_equal(mean, (exact / np.float32(3)).astype(np.float16))


@harness.on_ranks(workers=2)
def test_integer_sums_wrap_around(bps: Any) -> None:
    for dtype, expected in (("uint8", 254), ("int8", -2), ("int32", -2), ("int64", -2)):
        most = np.array([np.iinfo(dtype).max], dtype)
        assert bps.push_pull(most, average=False, name=dtype) == [expected]


def test_in_place_writes_into_the_array_and_nowhere_else(transport):
    harness.run(in_place_and_not, workers=2, env={"BPS_TRANSPORT": transport})


class OnlyDlpack:
    """An array of another library: nothing but the DLPack protocol."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@harness.on_ranks(workers=2)
def test_many_kinds_of_arrays(bps: Any) -> None:
    one = bps.rank() + 1

    plain = bytearray([one] * 10)
    assert bps.push_pull_inplace(plain, average=False, name="bytearray") is plain
    assert plain == bytearray([3] * 10)

    view = memoryview(bytearray([one] * 10))[2:8]
    bps.push_pull_inplace(view, average=False, name="memoryview")
    assert bytes(view.obj) == bytes([one, one, 3, 3, 3, 3, 3, 3, one, one])

    typed = memoryview(np.full(4, one, np.float64))
    bps.push_pull_inplace(typed, average=False, name="typed memoryview")
    assert typed.tolist() == [3.0] * 4

    import array

    floats = array.array("f", [one] * 5)
    bps.push_pull_inplace(floats, average=False, name="array.array")
    assert floats.tolist() == [3.0] * 5

    behind = np.full(6, one, np.int32)
    foreign = OnlyDlpack(behind)
    result = bps.push_pull(foreign, average=False, name="dlpack")
    assert result.tolist() == [3] * 6
    assert behind.tolist() == [one] * 6
    bps.push_pull_inplace(foreign, average=False, name="dlpack, in place")
    assert behind.tolist() == [3] * 6

    shared = bps.empty((2, 3), "float32")
    assert shared.tolist() == [[0.0] * 3] * 2
    shared[...] = one
    bps.push_pull_inplace(shared[1], average=False, name="a row of empty()")
    assert shared.tolist() == [[one] * 3, [3.0] * 3]


@harness.on_ranks(workers=3)
def test_calls_without_a_name_match_by_their_order(bps: Any) -> None:
    size, rank = bps.size(), bps.rank()
    for round_ in range(20):
        first = bps.push_pull_async(np.full(3, rank + round_, np.int32), average=False)
        second = bps.push_pull_async(np.full(3, 10 * rank + round_, np.int32), average=False)
        other = bps.push_pull_async(np.full((2, 2), rank, np.float32), average=False)
        assert bps.wait([second, first, other])[0].tolist() == [10 * (size - 1) * size // 2 + size * round_] * 3
        # Already taken by wait(), in its own order.
    total = bps.push_pull(np.ones(7, np.float32))
    assert total.tolist() == [1.0] * 7, "average is the default"


def test_a_call_names_no_argument_to_the_core(alone, monkeypatch):
    """With one keyword pybind11 makes a text of the name of each argument, which takes a fifth of a short call."""
    keywords = []
    start_operation = _core.start_operation

    def noting(*arguments: Any, **named: Any) -> Any:
        keywords.append(named)
        return start_operation(*arguments, **named)

    monkeypatch.setattr(_core, "start_operation", noting)
    alone.push_pull_inplace(np.ones(4), name="x")
    assert keywords == [{}]

# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks and among all, against numpy."""

from typing import Any

import numpy as np
from reference.values import NUMPY_DTYPES, pushed

# In the notice, at its edge, beside it, in several partitions.
COUNTS = (0, 1, 7, 120, 121, 1000, 20_000)


def around(bps: Any, memory: str) -> None:
    """Each rank sends to the next one and receives from the one before, in every order of starting."""
    rank, size = bps.rank(), bps.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    make = bps.empty if memory == "empty" else np.empty
    for dtype in NUMPY_DTYPES:
        for count in COUNTS:
            out, got = make(count, dtype), make(count, dtype)
            out[...] = pushed(count, dtype, rank)
            if rank % 2 and size % 2 == 0:
                assert bps.recv(got, src=before) is got
                bps.send(out, dst=after)
            else:
                sent = bps.send_async(out, dst=after)
                assert bps.recv(got, src=before) is got
                assert sent.wait() is out
            assert np.array_equal(got, pushed(count, dtype, before)), (dtype, count)
            assert np.array_equal(out, pushed(count, dtype, rank)), "send changed its input"


def many_under_way(bps: Any) -> None:
    """Messages of several names, tags and sizes, which are waited for in another order than they were started."""
    rank, size = bps.rank(), bps.size()
    handles, expected = [], []
    for peer in (other for other in range(size) if other != rank):
        for number in range(30):
            count = (3, 500, 9000)[number % 3]
            how: dict[str, Any] = {"name": ("a", "b", None)[number % 3], "tag": number % 2}
            handles.append(bps.send_async(np.full(count, 100.0 * rank + number), dst=peer, **how))
            got = np.empty(count)
            handles.append(bps.recv_async(got, src=peer, **how))
            expected.append((got, 100.0 * peer + number))
    for handle in reversed(handles):
        bps.synchronize(handle)
    for got, value in expected:
        assert np.all(got == value), (got[0], value)


def from_any(bps: Any) -> None:
    """Rank 0 takes messages from all, small and large ones, then what is left from each by name."""
    rank, size = bps.rank(), bps.size()
    for count in (3, 5000):
        if rank == 0:
            came = []
            got = np.empty(count)
            for _ in range(2 * (size - 1)):
                src = bps.recv_any(got, tag=1)
                assert np.all(got == 10 * src + came.count(src)), "each rank's in order"
                came.append(src)
            for src in range(1, size):
                bps.send(np.zeros(1), dst=src, tag=2)
                for number in (2, 3):
                    assert bps.recv(got, src=src, tag=1) is got
                    assert np.all(got == 10 * src + number)
            assert sorted(came) == sorted([*range(1, size)] * 2)
        else:
            for number in range(4):
                if number == 2:
                    bps.recv(np.empty(1), src=0, tag=2)
                bps.send(np.full(count, 10.0 * rank + number), dst=0, tag=1)
        bps.barrier()


def gathers_and_scatters(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for dtype in NUMPY_DTYPES:
        for rows in (0, 1, 200):
            for root in range(size):
                part = pushed(3 * rows, dtype, rank).reshape(rows, 3)
                everybody = np.concatenate([pushed(3 * rows, dtype, other).reshape(rows, 3) for other in range(size)])
                whole = bps.gather(part, "g", root=root)
                if rank == root:
                    assert whole.dtype == dtype
                    assert np.array_equal(whole, everybody), (dtype, rows)
                    out = np.empty_like(everybody)
                    assert bps.gather_async(part, root=root, out=out).wait() is out
                    assert np.array_equal(out, everybody)
                else:
                    assert whole is None
                    assert bps.gather_async(part, root=root).wait() is None
                mine = np.empty_like(part)
                assert bps.scatter(everybody if rank == root else None, "s", root=root, out=mine) is mine
                assert np.array_equal(mine, part)


def exchanges(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    for dtype in NUMPY_DTYPES:
        for rows in (1, 50, 3000):
            mine = np.concatenate(
                [pushed(2 * rows, dtype, 10 * rank + other).reshape(rows, 2) for other in range(size)]
            )
            right = np.concatenate(
                [pushed(2 * rows, dtype, 10 * other + rank).reshape(rows, 2) for other in range(size)]
            )
            found = bps.all_to_all(mine, "x")
            assert found.dtype == dtype
            assert np.array_equal(found, right), (dtype, rows)
            out = np.empty_like(mine)
            assert bps.all_to_all_async(mine, out=out).wait() is out
            assert np.array_equal(out, right)


def uneven(bps: Any) -> None:
    """Parts that differ in size: where all ranks know, and where they have to tell each other."""
    rank, size = bps.rank(), bps.size()
    for factor in (1, 700, 2):
        for dtype in ("float32", "int64"):
            rows = [factor * other for other in range(size)]  # rank 0 has nothing
            part = pushed(3 * rows[rank], dtype, rank).reshape(-1, 3)
            everybody = np.concatenate([pushed(3 * rows[other], dtype, other).reshape(-1, 3) for other in range(size)])
            assert np.array_equal(bps.all_gather(part, "u", uneven=True), everybody)
            assert np.array_equal(bps.all_gather_async(part, uneven=True).wait(), everybody)
            out = np.empty_like(everybody)
            assert bps.all_gather(part, "u", uneven=True, out=out) is out
            assert np.array_equal(out, everybody)
            whole = bps.gather(part, "u", root=size - 1, uneven=True)
            assert (whole is None) == (rank != size - 1)
            assert whole is None or np.array_equal(whole, everybody)
            mine = np.empty_like(part)
            bps.scatter(everybody if rank == 0 else None, "u", sizes=rows, out=mine)
            assert np.array_equal(mine, part)
            # Rank r gives rank p (r + p) * factor rows.
            sizes = [(rank + other) * factor for other in range(size)]
            given = np.concatenate([np.full((count, 2), 10 * rank + other, dtype) for other, count in enumerate(sizes)])
            right = np.concatenate([np.full((count, 2), 10 * other + rank, dtype) for other, count in enumerate(sizes)])
            assert np.array_equal(bps.all_to_all(given, "v", sizes=sizes), right)
            assert np.array_equal(bps.all_to_all(given, "v", sizes=sizes, out_sizes=sizes), right)
    nothing = np.empty((0, 0)) if rank == 0 else np.full((2, 3), rank)
    whole = bps.gather(nothing.astype(np.float32), "n", root=size - 1, uneven=True)
    assert whole is None or whole.shape == (2 * size - 2, 3)
    equal = bps.all_gather(np.full((2, 2), rank), "e", uneven=True)
    assert np.array_equal(equal, np.repeat(np.arange(size), 4).reshape(-1, 2))


def in_groups(bps: Any) -> None:
    """Messages of different groups do not meet, and ranks are those of the job."""
    rank, size = bps.rank(), bps.size()
    everybody = bps.new_group(range(size), "all")
    others = bps.new_group(range(1, size), "others") if rank else None
    if rank == size - 1:
        sent = [
            bps.send_async(np.full(4, 1.0), dst=1, group=others),
            bps.send_async(np.full(4, 2.0), dst=1),
            bps.send_async(np.full(4, 3.0), dst=1, group=everybody),
        ]
        bps.wait(sent)
    if rank == 1:
        got = {key: np.empty(4) for key in "abc"}
        bps.recv(got["c"], src=size - 1, group=everybody)
        bps.recv(got["b"], src=size - 1)
        bps.recv(got["a"], src=size - 1, group=others)
        assert [got[key][0] for key in "abc"] == [1.0, 2.0, 3.0]
    if others is not None:
        whole = bps.gather(np.full(2, rank), root=size - 1, group=others)
        if rank == size - 1:
            assert whole.tolist() == [other for other in range(1, size) for _ in range(2)]
        found = bps.all_to_all(np.arange(size - 1) + 10 * rank, group=others)
        assert found.tolist() == [10 * other + others.rank for other in others.ranks]


def many_arrays(bps: Any) -> None:
    rank, size = bps.rank(), bps.size()
    total = sum(range(1, size + 1))
    arrays = {f"w{number}": np.full(10 ** (number % 5), float(rank + 1)) for number in range(12)}
    found = bps.push_pull_many(arrays, "model", average=False)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert np.all(found[name] == total), name
        assert np.all(array == rank + 1), "they were not to change"
    listed = list(arrays.values())
    replaced = bps.push_pull_many(listed, average=False, inplace=True)
    assert all(one is other for one, other in zip(replaced, listed, strict=True))
    assert all(np.all(array == total) for array in listed)
    again = bps.push_pull_many_async([np.full(3, rank), np.full(3, float(rank))], "mixed", op="max").wait()
    assert [one.tolist() for one in again] == [[size - 1] * 3, [float(size - 1)] * 3]
    assert bps.push_pull_many([]) == []
    assert bps.push_pull_many({}) == {}

# SPDX-License-Identifier: Apache-2.0
"""Memory that the process gives back, and others in its place: the device must not go on with the old pages."""

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.collectives import broadcasts, mixed_kinds, pushes_and_pulls, scatter_and_gather
from bodies.sums import interleaved_rounds
from harness import await_mark, mark
from levels import cases

RDMA = harness.over("rdma")
SIZE = 1 << 20
PAGE = mmap.PAGESIZE
MADV_FREE = 8
MREMAP_MAYMOVE = 1
MREMAP_DONTUNMAP = 4
SYS_MREMAP = 25

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long


def mapped(address: int | None = None, size: int = SIZE, flags: int = 0) -> int:
    """Address of private pages; MAP_FIXED where an address is given."""
    fixed = 0 if address is None else 0x10
    got = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags or 0x22 | fixed, -1, 0)
    assert got != ctypes.c_void_p(-1).value
    assert address is None or got == address
    return int(got)


def array_at(address: int) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_byte * SIZE).from_address(address), np.float32)


def move_away(address: int) -> None:
    """The pages go elsewhere; what stays is empty, as of a mapping that is new."""
    arguments = (address, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0)
    to = libc.syscall(SYS_MREMAP, *map(ctypes.c_ulong, arguments))
    assert to not in (-1, address)
    libc.munmap(to, SIZE)


CHANGES: dict[str, Callable[[int], Any]] = {
    "unmapped": lambda address: (libc.munmap(address, SIZE), mapped(address)),
    "replaced": mapped,
    "a part is replaced": lambda address: mapped(address + SIZE // 2, PAGE),
    "discarded": lambda address: libc.madvise(address, SIZE, mmap.MADV_DONTNEED),
    "a part is discarded": lambda address: libc.madvise(address + SIZE // 4, PAGE, mmap.MADV_DONTNEED),
    "freed lazily": lambda address: libc.madvise(address, SIZE, MADV_FREE),
    "moved": move_away,
}


def gives_back(bps: Any) -> dict[str, list[bool]]:
    """For each change, whether the sums before and after it are right."""
    right: dict[str, list[bool]] = {}
    other = bps.empty(1, np.float32)
    for name, change in CHANGES.items():
        address = mapped()
        array = array_at(address)
        for step in range(4):
            array[:] = bps.rank() + step
            bps.push_pull_inplace(array, False, name)
            right.setdefault(name, []).append(bool((array == 1 + 2 * step).all()))
            change(address)
        bps.push_pull_inplace(other, False, "other")  # by then all is known of the last change
        del array
    return right


def counters(bps: Any) -> tuple[int, int]:
    """Of blocks that were given back and used again, and of bytes that were staged because nobody watches them."""
    found = bps.metrics()["total"]
    return found["given_back"], found["unwatched_bytes"]


def gives_back_and_counts(bps: Any) -> tuple[dict[str, list[bool]], tuple[int, int]]:
    return gives_back(bps), counters(bps)


def test_memory_that_is_given_back_is_registered_anew_or_staged():
    for right, (given_back, staged) in harness.run(gives_back_and_counts, workers=2, servers=1, env=RDMA):
        assert right == {name: [True] * 4 for name in CHANGES}
        # Four changes of each; what was discarded is staged from then on.
        assert given_back == 4 * 4 + 3
        assert staged == 3 * 3 * SIZE


@pytest.mark.parametrize("rule", ["staged", "trusted"])
def test_the_setting(rule):
    for right, (given_back, staged) in harness.run(
        gives_back_and_counts, workers=2, servers=1, env=RDMA | {"BPS_RDMA_MEMORY": rule}
    ):
        assert given_back == 0
        if rule == "staged":
            assert right == {name: [True] * 4 for name in CHANGES}
            assert staged == 4 * len(CHANGES) * SIZE
        else:  # if this were right, the other tests here could not fail
            assert staged == 0
            assert all(found[0] for found in right.values())
            assert right["unmapped"] == [True, False, False, False]


@pytest.mark.parametrize(
    ("body", "args"),
    cases(
        [(mixed_kinds, ()), (pushes_and_pulls, ())],
        [(interleaved_rounds, ("plain", 60)), (scatter_and_gather, ("plain",)), (broadcasts, ())],
    ),
)
def test_operations_of_all_kinds_are_staged(body, args):
    harness.run(body, *args, workers=3, servers=2, env=RDMA | harness.cut_at(8192) | {"BPS_RDMA_MEMORY": "staged"})


def files_change(bps: Any, folder: str) -> tuple[list[bool], tuple[int, int]]:
    """The file behind an array shrinks, so that its pages go, and grows again: no event of the kernel tells."""
    path = Path(folder) / str(bps.rank())
    right = []
    for mode in ("w+", "c"):
        path.write_bytes(bytes(SIZE))
        array = np.memmap(path, np.float32, mode, shape=(SIZE // 4,))
        for step in range(3):
            array[:] = bps.rank() + step
            bps.push_pull_inplace(array, False, mode)
            right.append(bool((array == 1 + 2 * step).all()))
            os.truncate(path, 0)
            os.truncate(path, SIZE)
    return right, counters(bps)


def test_files_that_shrink_and_grow(tmp_path):
    found = harness.run(files_change, str(tmp_path), workers=2, servers=1, env=RDMA)
    assert found == [([True] * 6, (0, 6 * SIZE))] * 2


def resizes(bps: Any) -> list[bool]:
    """mmap.resize(), which moves the pages, between two arrays of the same memory."""
    right = []
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for step in range(6):
        array = np.frombuffer(memory, np.float32)
        array[:] = bps.rank() + step
        bps.push_pull_inplace(array, False, f"of {len(array)}")
        right.append(bool((array == 1 + 2 * step).all()))
        del array
        memory.resize(SIZE * (1 + (step + 1) % 3))
    return right


def test_a_mapping_that_is_resized():
    assert harness.run(resizes, workers=2, servers=1, env=RDMA) == [[True] * 6] * 2


def forks(bps: Any) -> tuple[list[bool], tuple[int, int]]:
    """Children have copies of registered memory, and may write to them and give them back."""
    array = array_at(mapped())
    right = []
    for step in range(3):
        array[:] = bps.rank() + step
        bps.push_pull_inplace(array, False, "x")
        child = os.fork()
        if child == 0:
            has_copy = bool((array == 1 + 2 * step).all())
            array[:] = -1
            libc.munmap(array.ctypes.data, SIZE)
            os._exit(0 if has_copy else 1)
        array[0] = 7  # perhaps before the child looks
        assert os.waitpid(child, 0)[1] == 0
        right.append(bool(array[0] == 7 and (array[1:] == 1 + 2 * step).all()))
    return right, counters(bps)


def test_a_process_that_forks():
    for right, counted in harness.run(forks, workers=2, servers=1, env=RDMA):
        assert right == [True] * 3
        assert counted == (0, 0)


def gives_back_too_soon(bps: Any) -> Any:
    """Rank 0 gives the memory of an operation back before rank 1 has begun it."""
    address = mapped()
    array = array_at(address)
    array[:] = bps.rank() + 1
    outcome: Any = None
    if bps.rank() == 0:
        handle = bps.push_pull_async_inplace(array, False, "early")
        harness.eventually(lambda: bps.metrics()["total"]["data_bytes"] > 0, what="the push")
        mapped(address)
        mark("given back")
        with pytest.raises(bps.InvalidArgumentError) as error:
            handle.wait()
        outcome = str(error.value)
    else:
        await_mark("given back", 0)
        bps.push_pull_inplace(array, False, "early")
        outcome = bool((array == 3).all())
    array[:] = bps.rank() + 5
    bps.push_pull_inplace(array, False, "early")
    return outcome, bool((array == 11).all())


def test_memory_that_is_given_back_during_an_operation():
    (error, first), (is_right, second) = harness.run(gives_back_too_soon, workers=2, servers=1, env=RDMA)
    assert "push_pull of 'early'" in error
    assert "given back" in error
    assert (first, is_right, second) == (True, True, True)

# SPDX-License-Identifier: Apache-2.0
"""Methods of compression that are written in Python, through real processes: results, the GIL, and what goes wrong."""

from __future__ import annotations

import sys
import threading
from typing import Any

import harness
import numpy as np
import pytest

from bps_rdma.compression import Codec, register
from bps_rdma.errors import InvalidArgumentError, MismatchError, PeerLostError

COUNT = 50_001
SMALL = {"BYTEPS_PARTITION_BYTES": "16384", "BPS_MIN_PARTITION_BYTES": "16384", "BPS_TRANSPORT": "tcp"}


def encode(array: np.ndarray, _: int) -> bytes:
    return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def decode(code: np.ndarray, elements: int) -> np.ndarray:
    assert len(code) == 2 * elements
    return (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def cut(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)


def values(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng(100 * step + rank).standard_normal(COUNT).astype(np.float32)


def busy(until: threading.Event) -> None:
    """A thread of the program that wants the GIL all the time, and makes calls of its own."""
    import bps_rdma

    while not until.is_set():
        sum(range(1000))
        bps_rdma.metrics()
        bps_rdma.dump()


def used(bps: Any) -> None:
    register("cut", encode, decode, block=1, block_bytes=2)
    bps.barrier()  # a server refuses what was encoded by a method that it does not know yet
    over = threading.Event()
    threads = [threading.Thread(target=busy, args=(over,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    every = [np.stack([values(rank, step) for rank in range(bps.size())]) for step in range(10)]
    for step, of_ranks in enumerate(every):
        mine = of_ranks[bps.rank()].copy()
        if step % 2:
            handle = bps.push_pull_async(mine, average=False, name="g", compression="cut:everywhere=1")
            while not handle.done():
                sum(range(1000))
            result = handle.wait()
        else:
            result = bps.push_pull(mine, average=False, name="g", compression="cut:everywhere=1")
        total = cut(of_ranks[0].copy())
        for other in of_ranks[1:]:
            total = total + cut(other)
        assert result.tobytes() == cut(total).tobytes(), step
    # With feedback nothing is lost for ever.
    sent, arrived = np.zeros(COUNT), np.zeros(COUNT)
    for of_ranks in every:
        sent += of_ranks.sum(0, dtype=np.float64)
        arrived += bps.push_pull(
            of_ranks[bps.rank()], average=False, name="f", compression="cut:feedback=1,everywhere=1"
        )
    assert np.abs(sent - arrived).max() < 0.15
    assert bps.metrics()["total"]["compressed_bytes"] > 0
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("where", [{"workers": 3}, harness.on_hosts("ab")], ids=["tcp", "two hosts"])
def test_sums_are_those_of_the_functions(where: dict[str, Any]) -> None:
    harness.run(used, **where, env=SMALL)


def left_running(bps: Any) -> None:
    """Python ends while loops are in the functions: no call waits for them with the GIL."""
    register("cut", encode, decode, block=1, block_bytes=2)
    bps.barrier()
    for step in range(3):
        bps.push_pull_async(values(bps.rank(), step), name=f"{step}", compression="cut:everywhere=1")
    bps.barrier()  # all have started theirs
    bps.shutdown()


def test_python_may_end() -> None:
    harness.run(left_running, workers=2, env=SMALL)


def failing(bps: Any) -> None:
    def raising(array: np.ndarray, _: int) -> bytes:
        raise ZeroDivisionError("no such code")

    reported: list[Any] = []
    sys.unraisablehook = lambda raised: reported.append(raised.exc_value)
    register("cut", raising if bps.rank() == 0 else encode, decode, block=1, block_bytes=2)
    bps.barrier()
    with pytest.raises(PeerLostError, match="lost"):
        bps.push_pull(values(0, 0), name="g", compression="cut:everywhere=1")
    if bps.rank() == 0:
        assert isinstance(reported[0], ZeroDivisionError)


def test_a_function_that_raises_ends_the_job() -> None:
    harness.run(failing, workers=2, servers=None, env=SMALL)


def refused(bps: Any) -> None:
    register("cut", encode, decode, block=1, block_bytes=2)
    with pytest.raises(InvalidArgumentError, match="servers by themselves"):
        bps.push_pull(values(0, 0), name="g", compression="cut")


def test_dedicated_servers_refuse() -> None:
    harness.run(refused, workers=2, servers=1, env=SMALL)


def forgotten(bps: Any) -> None:
    if bps.rank() == 0:
        register("cut", encode, decode, block=1, block_bytes=2)
    else:
        with pytest.raises(InvalidArgumentError, match="no compression method 'cut'"):
            bps.declare("g", values(0, 0), compression="cut")
    with pytest.raises(MismatchError):
        bps.push_pull(values(0, 0), name="g", compression="cut" if bps.rank() == 0 else "int8")


def test_ranks_must_register_alike() -> None:
    harness.run(forgotten, workers=2)


def test_what_makes_no_sense_is_refused() -> None:
    for name in ("int8", "", "Cut", "a:b", "x" * 33):
        with pytest.raises(InvalidArgumentError, match="name"):
            register(name, encode, decode, block=1, block_bytes=2)
    with pytest.raises(InvalidArgumentError, match="block=0"):
        register("zero", encode, decode, block=0, block_bytes=2)
    register("twice", encode, decode, block=1, block_bytes=2)
    with pytest.raises(InvalidArgumentError, match="already"):
        register("twice", encode, decode, block=1, block_bytes=2)
    with pytest.raises(InvalidArgumentError, match="twice"):
        Codec("nothing_like_it")
    codec = Codec("twice")
    code = codec.encode(values(0, 0))
    assert codec.decode(code, COUNT).tobytes() == cut(values(0, 0)).tobytes()
    for wrong in (code[:-1], b"\0" + code[1:], b""):
        with pytest.raises(InvalidArgumentError):
            codec.decode(wrong, COUNT)

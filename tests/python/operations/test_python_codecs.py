# SPDX-License-Identifier: Apache-2.0
"""Methods of compression that are written in Python, through real processes: results, the GIL, and what goes wrong."""

import re
import sys
import threading
from typing import Any

import harness
import numpy as np
import pytest

from bps_rdma.compression import Codec, Registered, register
from bps_rdma.errors import InvalidArgumentError, MismatchError

COUNT = 50_001
SMALL = {"BYTEPS_PARTITION_BYTES": "16384", "BPS_MIN_PARTITION_BYTES": "16384", "BPS_TRANSPORT": "tcp"}
NEVER = {"BPS_TIMEOUT": str(100 * harness.PATIENCE)}  # nobody waits for it


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


def cutting(**parameters: bool) -> Registered:
    return Registered(method="cut", **parameters)


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
            handle = bps.push_pull_async(mine, average=False, name="g", compression=cutting(everywhere=True))
            while not handle.done():
                sum(range(1000))
            result = handle.wait()
        else:
            result = bps.push_pull(mine, average=False, name="g", compression=cutting(everywhere=True))
        total = cut(of_ranks[0].copy())
        for other in of_ranks[1:]:
            total = total + cut(other)
        assert result.tobytes() == cut(total).tobytes(), step
    # With feedback nothing is lost for ever.
    sent, arrived = np.zeros(COUNT), np.zeros(COUNT)
    for of_ranks in every:
        sent += of_ranks.sum(0, dtype=np.float64)
        arrived += bps.push_pull(
            of_ranks[bps.rank()], average=False, name="f", compression=cutting(feedback=True, everywhere=True)
        )
    assert np.abs(sent - arrived).max() < 0.15
    assert bps.metrics()["total"]["compressed_bytes"] > 0
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("where", [{"workers": 3}, harness.on_hosts("ab")], ids=["tcp", "two hosts"])
def test_sums_are_those_of_the_functions(where: dict[str, Any]) -> None:
    harness.run(used, **where, env=SMALL)


@harness.on_ranks(workers=2, env=SMALL)
def test_python_may_end(bps: Any) -> None:
    """Python ends while loops are in the functions: no call waits for them with the GIL."""
    register("cut", encode, decode, block=1, block_bytes=2)
    bps.barrier()
    for step in range(3):
        bps.push_pull_async(values(bps.rank(), step), name=f"{step}", compression=cutting(everywhere=True))
    bps.barrier()  # all have started theirs
    bps.shutdown()


def failing(bps: Any, function: str, fails: str) -> None:
    """A function of rank 0 fails, once in each of the two rounds: nobody is lost, and everybody is told what it was."""
    fails_now = [True]

    def failing_one(*args: Any) -> Any:
        if not fails_now:
            return encode(*args) if function == "encode" else decode(*args)
        if fails == "raises":
            raise ZeroDivisionError("no such code")
        if fails == "returns too little":
            return b"1234"
        if fails == "waits":
            running.wait()
        else:
            getattr(bps, fails)(*([np.ones(5, np.float32)] if fails == "push_pull" else []))
        return b""

    bps.push_pull(np.ones(5, np.float32))  # the same name as that of the function's call, which so could begin
    reported: list[Any] = []
    sys.unraisablehook = lambda raised: reported.append(raised.exc_value)
    mine: dict[str, Any] = {"encode": encode, "decode": decode} | ({function: failing_one} if bps.rank() == 0 else {})
    register("cut", **mine, block=1, block_bytes=2)
    bps.barrier()  # a server refuses what was encoded by a method that it does not know yet
    why = {
        "raises": "raised ZeroDivisionError: no such code",
        "returns too little": "returned ",
        "waits": "raised InvalidArgumentError: the codec 'cut' calls bps_rdma",
    }.get(fails, "raised InvalidArgumentError: the codec 'cut' calls bps_rdma")
    for _ in range(2):
        running = bps.push_pull_async(np.ones(5, np.float32), name="other") if bps.rank() == 0 else None
        with pytest.raises(InvalidArgumentError) as told:
            bps.push_pull(values(0, 0), name="g", compression=cutting(everywhere=True, feedback=True))
        assert f"{function}() of the codec 'cut' {why}" in str(told.value), told.value
        assert "push_pull of 'g', round " in str(told.value)
        assert "on worker 0" in str(told.value)
        bps.push_pull(np.ones(5, np.float32), name="other") if running is None else running.wait()
    if bps.rank() == 0 and fails == "raises":
        assert isinstance(reported[0], ZeroDivisionError)
    bps.barrier()
    fails_now.clear()
    bps.barrier()
    of_ranks = [values(rank, 7) for rank in range(bps.size())]
    sums = bps.push_pull(
        of_ranks[bps.rank()], average=False, name="g", compression=cutting(everywhere=True, feedback=True)
    )
    assert np.abs(sums - sum(of_ranks)).max() < 0.1


@pytest.mark.parametrize(
    "where",
    [{"workers": 2}, {"workers": 2, "env": {"BPS_MIN_WORKERS": "1"}}, harness.on_hosts("aabb")],
    ids=["tcp", "two phases", "two hosts"],
)
@pytest.mark.parametrize("function", ["encode", "decode"])
def test_a_function_that_raises_is_told_to_all_ranks(where: dict[str, Any], function: str) -> None:
    harness.run(failing, function, "raises", **where | {"env": SMALL | NEVER | where.get("env", {})})


@pytest.mark.parametrize("fails", ["returns too little", "push_pull", "barrier", "metrics", "waits"])
@pytest.mark.parametrize("function", ["encode", "decode"])
def test_a_function_may_not_call_the_library(function: str, fails: str) -> None:
    harness.run(failing, function, fails, workers=2, env=SMALL | NEVER)


def waits_for_a_thread(bps: Any, function: str, call: str) -> None:
    """The first call of a function of rank 0 waits for a thread that calls the library, and so for that function."""
    told: list[str] = []
    first = [True]

    def calls() -> None:
        with pytest.raises(InvalidArgumentError) as refused:
            getattr(bps, call)(*([np.ones(5, np.float32)] if call == "push_pull" else []))
        told.append(str(refused.value))

    def waiting_one(*args: Any) -> Any:
        if first:
            first.clear()
            thread = threading.Thread(target=calls)
            thread.start()
            thread.join()
        return encode(*args) if function == "encode" else decode(*args)

    bps.push_pull(np.ones(5, np.float32))  # as above
    mine: dict[str, Any] = {"encode": encode, "decode": decode} | ({function: waiting_one} if bps.rank() == 0 else {})
    register("cut", **mine, block=1, block_bytes=2)
    bps.barrier()  # a server refuses what was encoded by a method that it does not know yet
    of_ranks = [values(rank, 0) for rank in range(bps.size())]
    for _ in range(2):
        sums = bps.push_pull(of_ranks[bps.rank()], average=False, name="g", compression=cutting(everywhere=True))
        assert sums.tobytes() == cut(sum(map(cut, of_ranks))).tobytes()
    if bps.rank() == 0:
        assert "the loop for the codec 'cut', which may wait for this thread" in told[0], told


@pytest.mark.parametrize(
    ("function", "call"),
    [pytest.param("encode", "push_pull", marks=pytest.mark.long), ("decode", "push_pull"), ("encode", "barrier")],
)
def test_a_function_may_not_wait_for_a_thread_that_calls_the_library(function: str, call: str) -> None:
    """It would never end. Its process would count as lost."""
    env = SMALL | NEVER | {"BPS_HEARTBEAT_TIMEOUT": str(20 * harness.PATIENCE)}  # it is refused after half of that
    with harness.start(waits_for_a_thread, function, call, workers=2, env=env) as job:
        job.results()
        assert re.search(r"bps-\S+, which runs the codec 'cut', has made no progress for ", job.log("rank 0"))


def refused(bps: Any) -> None:
    register("cut", encode, decode, block=1, block_bytes=2)
    with pytest.raises(InvalidArgumentError, match="servers by themselves"):
        bps.push_pull(values(0, 0), name="g", compression=cutting())


def test_dedicated_servers_refuse() -> None:
    harness.run(refused, workers=2, servers=1, env=SMALL)


@harness.on_ranks(workers=2)
def test_ranks_must_register_alike(bps: Any) -> None:
    if bps.rank() == 0:
        register("cut", encode, decode, block=1, block_bytes=2)
    else:
        with pytest.raises(InvalidArgumentError, match="no compression method 'cut'"):
            bps.declare("g", values(0, 0), compression="cut")
    with pytest.raises(MismatchError):
        bps.push_pull(values(0, 0), name="g", compression=cutting() if bps.rank() == 0 else bps.Int8())
    bps.barrier()  # a rank that leaves would be the reason for the other one


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


def test_a_codec_without_a_job_says_what_its_functions_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)
    register("raising", lambda array, seed: 1 / 0, lambda code, elements: code.no_such, block=1, block_bytes=1)
    with pytest.raises(InvalidArgumentError, match=r"encode\(\) of the codec 'raising' raised ZeroDivisionError"):
        Codec("raising").encode(values(0, 0))
    with pytest.raises(InvalidArgumentError, match=r"decode\(\) of the codec 'raising' raised AttributeError"):
        Codec("raising").decode(b"\1" * 11, 10)
    assert Codec("int8").decode(Codec("int8").encode([0.0, 0.0]), 2).tolist() == [0, 0]

# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM handlers and shutdown() by another thread end every wait, soon, and leave nothing behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark
from harness.freeze import frozen, thread_of

ENV = {
    "BPS_TIMEOUT": str(60 * harness.PATIENCE),
    "BPS_JOIN_TIMEOUT": str(60 * harness.PATIENCE),
    "BPS_SHUTDOWN_TIMEOUT": str(4 * harness.PATIENCE),
}
SOON_S = 20 * harness.PATIENCE  # half a second on a quiet machine; without the interrupt it would be 60 s


def open_things() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def comes_back_to(before: tuple[int, int]) -> bool:
    """That is all that is open, soon: the kernel lists a thread for a moment after it has been joined."""
    return harness.eventually(lambda: open_things() == before, what=f"threads and descriptors as before, {before},")


# ---- Ctrl-C


def starts_and_is_interrupted(bps: Any) -> tuple[str, float, bool, bool]:
    np.ones(10) @ np.ones(10)  # whatever numpy starts is not ours
    before = open_things()
    try:
        mark("ready")
        bps.init()
    except KeyboardInterrupt:
        return "interrupted", time.monotonic(), comes_back_to(before), bps.is_initialized()
    return "nothing", 0.0, False, False


@pytest.mark.parametrize("present", [0, 1])
@pytest.mark.parametrize("servers", [None, 1])
def test_ctrl_c_in_init(present, servers):
    """Rank 0 waits for the other one; rank 1 of an embedded job finds no scheduler."""
    rank_env = [{"DMLC_WORKER_ID": str(present), "RANK": str(present)}]
    env = ENV | {"DMLC_NUM_WORKER": "2", "WORLD_SIZE": "2"}
    options = {"workers": 1, "servers": servers, "env": env, "rank_env": rank_env, "init": False}
    with harness.start(starts_and_is_interrupted, **options) as job:
        sent = job.interrupt("ready")
        kind, came, clean, initialised = job.outcomes()[0].value
    assert kind == "interrupted"
    assert came - sent < SOON_S
    assert clean
    assert not initialised


def waits_and_is_interrupted(bps: Any, where: str) -> tuple[str, float, float]:
    array = np.ones(1000, np.float32)
    came = 0.0
    if bps.rank() == 0:
        try:
            mark("ready")  # on a starved machine it is here that the signal comes
            if where == "barrier":
                bps.barrier()
            elif where == "new_group":
                bps.new_group([0, 1], "g")
            elif where == "declare":
                await_mark("scheduler is stopped")
                mark("declares")
                bps.declare("late", array)
            else:
                bps.push_pull(array, name="waits")
            return "nothing", 0.0, 0.0
        except KeyboardInterrupt:
            came = time.monotonic()
            mark("interrupted")
    else:
        await_mark("go on")
    if where == "push_pull":
        return "interrupted", came, 0.0  # what becomes of its round is another story
    await_mark("go on")
    if where == "barrier":
        if bps.rank() == 0:
            await_mark("rank 1 waits")
        mark("at the barrier")
        bps.barrier()
        mark("past the barrier")
        return "interrupted", came, 0.0
    group = bps.new_group([0, 1], "g")
    return "interrupted", came, float(bps.push_pull(array, average=False, name="g", group=group)[0])


@pytest.mark.parametrize("where", ["barrier", "new_group", "declare", "push_pull"])
def test_ctrl_c_while_waiting(where):
    env = ENV | {"BPS_HEARTBEAT_TIMEOUT": "60"}
    with harness.start(waits_and_is_interrupted, where, workers=2, servers=1, env=env) as job:
        job.await_marks("ready", ranks=[0])
        if where == "declare":
            job.kill("scheduler", signal.SIGSTOP)
            job.set_mark("scheduler is stopped")
        sent = job.interrupt("declares" if where == "declare" else "ready")
        job.await_marks("interrupted", ranks=[0])
        if where == "declare":
            job.kill("scheduler", signal.SIGCONT)
        job.set_mark("go on")
        if where == "barrier":
            job.await_marks("at the barrier", ranks=[1])
            job.await_call("rank 1")
            assert not job.has_marked("past the barrier", 1), "the interrupted call of rank 0 counted"
            job.set_mark("rank 1 waits")
        values = job.values()
        job.helper_statuses()
    kind, came, _ = values[0]
    assert kind == "interrupted"
    assert came - sent < SOON_S
    if where in ("new_group", "declare"):
        assert [total for _, _, total in values] == [2.0, 2.0]


def comes_again_after_an_interrupt(bps: Any) -> None:
    if bps.rank() == 0:
        harness.is_interrupted(bps.barrier)
    else:
        await_mark("interrupted", 0)
    bps.barrier(timeout=20 * harness.PATIENCE)


def test_nobody_meets_a_call_that_was_interrupted():
    """What tells the scheduler of the interrupt is late here. Rank 1 comes once rank 0 has its exception."""
    for _ in range(10):
        with harness.start(comes_again_after_an_interrupt, workers=2) as job:
            job.await_marks("waiting", [0])
            job.await_call("rank 0")
            with frozen(thread_of(job.pid("rank 0"), "bps-van")):
                begin = time.monotonic()
                job.kill("rank 0", signal.SIGINT)
                # Rank 0 tells too early if it does so now, and rank 1 then gets the time to meet that call.
                harness.eventually(lambda: time.monotonic() > begin + 0.5)  # noqa: B023  called at once
            if time.monotonic() < begin + 0.9:  # after a second rank 0 waits for that no more
                job.results()
                return
    raise AssertionError("this machine was too busy, ten times")


def leaves_and_is_interrupted(bps: Any) -> tuple[str, float, bool]:
    before = open_things()
    bps.init()
    if bps.rank() == 1:
        await_mark("go on")
        bps.shutdown()
        return "left", 0.0, True
    try:
        mark("ready")
        bps.shutdown()
        kind = "left"
    except KeyboardInterrupt:
        kind = "interrupted"
    came = time.monotonic()
    return kind, came, comes_back_to(before) and not bps.is_initialized()


@pytest.mark.parametrize("servers", [None, 1])
def test_ctrl_c_in_shutdown(servers):
    env = ENV | {"BPS_SHUTDOWN_TIMEOUT": "60"}
    with harness.start(leaves_and_is_interrupted, workers=2, servers=servers, env=env, init=False) as job:
        sent = job.interrupt("ready")
        job.wait("rank 0")
        job.set_mark("go on")
        kind, came, clean = job.outcomes()[0].value
        job.helper_statuses()
    assert kind == "interrupted"
    assert came - sent < SOON_S
    assert clean


# ---- A signal handler that shuts down


def is_terminated_in_init(bps: Any, ending: str) -> tuple[str, float, bool]:
    def handle(*_: object) -> None:
        bps.shutdown()
        if ending == "exit":
            sys.exit(5)

    signal.signal(signal.SIGTERM, handle)
    before = open_things()
    try:
        mark("ready")
        bps.init()
    except bps.NotInitializedError:
        kind = "return"
    except SystemExit:
        kind = "exit"
    else:
        kind = "nothing"
    return kind, time.monotonic(), comes_back_to(before) and not bps.is_initialized()


@pytest.mark.parametrize("ending", ["return", "exit"])
def test_a_handler_that_shuts_down_during_init(ending):
    env = ENV | {"WORLD_SIZE": "2"}
    with harness.start(is_terminated_in_init, ending, workers=1, env=env, init=False) as job:
        sent = job.interrupt("ready", signum=signal.SIGTERM)
        kind, came, clean = job.outcomes()[0].value
    assert kind == ending
    assert came - sent < SOON_S
    assert clean


def is_terminated_while_waiting(bps: Any, where: str) -> tuple[str, bool]:
    signal.signal(signal.SIGTERM, lambda *_: bps.shutdown())
    before = open_things()
    bps.init()
    bps.push_pull(np.ones(1000, np.float32), name="warm")
    if bps.rank() == 1:
        mark("ready")
        await_mark("go on")
        bps.shutdown()
        return "nothing", True
    mark("ready")
    try:
        if where == "barrier":
            bps.barrier()
        else:
            bps.push_pull(np.ones(1000, np.float32), name="blocked")
    except (bps.NotInitializedError, bps.PeerLostError) as error:
        kind = type(error).__name__
    else:
        kind = "nothing"
    return kind, comes_back_to(before)  # here, where the error does not keep its call's objects any more


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("where", ["barrier", "push_pull"])
def test_a_handler_that_shuts_down_during_a_wait(where, servers):
    options = {"workers": 2, "servers": servers, "env": ENV, "init": False}
    with harness.start(is_terminated_while_waiting, where, **options) as job:
        job.await_marks("ready")
        job.await_call("rank 0")
        job.kill("rank 0", signal.SIGTERM)
        job.set_mark("go on")
        outcomes = job.outcomes()
        job.helper_statuses()
    kind, clean = outcomes[0].value
    assert kind in ("NotInitializedError", "PeerLostError"), outcomes[0].error
    assert clean
    assert [outcome.status for outcome in outcomes] == [0, 0]


# ---- Another thread that shuts down


def forever(call: Callable[[int], object]) -> None:
    for number in range(10**9):
        call(number)


def calls_of_a_thread(bps: Any, what: str, ranks: list[int]) -> Callable[[int], object]:
    array = np.ones(5000, np.float32)
    me = threading.get_ident()
    calls: dict[str, Callable[[int], object]] = {
        "metrics": lambda _: bps.metrics(),
        "push_pull": lambda _: bps.push_pull(array, name=f"x{me}"),
        "async": lambda n: bps.push_pull_async(array, name=f"a{n % 50}"),
        "declare": lambda n: bps.declare(f"{me}.{n}", array),
        "barrier": lambda _: bps.barrier(),
        "new_group": lambda n: bps.new_group(ranks, f"{me}.{n}"),
        "properties": lambda _: (bps.rank(), bps.size(), bps.get_pushpull_speed()),
    }
    return calls[what]


def meets_a_shutdown(bps: Any, what: str, ranks: list[int], after: float) -> tuple[list[str], float]:
    """How three threads end that make these calls until the job ends, and how long after its end."""
    ended: list[str] = []

    def run() -> None:
        try:
            forever(calls_of_a_thread(bps, what, ranks))
        except bps.BpsError as error:
            ended.append(type(error).__name__)
        except BaseException as error:
            ended.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(after)
    bps.shutdown()
    began = time.monotonic()
    for thread in threads:
        thread.join(timeout=SOON_S)
    if any(thread.is_alive() for thread in threads):
        os.abort()  # with the stacks of all
    return ended, time.monotonic() - began


def has_many_lives(bps: Any, what: str) -> list[tuple[list[str], float]]:
    found = []
    for life in range(25):
        bps.init()
        found.append(meets_a_shutdown(bps, what, [0], 0.005 + 0.003 * (life % 5)))
    return found


CALLS = ["metrics", "push_pull", "async", "declare", "barrier", "new_group", "properties"]


@pytest.mark.parametrize("what", CALLS)
def test_shutdown_while_other_threads_work(what):
    (found,) = harness.run(has_many_lives, what, workers=1, env=ENV, init=False)
    for ended, seconds in found:
        assert ended == ["NotInitializedError"] * 3
        assert seconds < SOON_S


def meets_a_shutdown_while_it_waits(bps: Any, what: str) -> tuple[list[str], float]:
    if bps.rank() == 1:
        await_mark("down", 0)
        return [], 0.0
    found = meets_a_shutdown(bps, what, [0, 1], 0.5)
    mark("down")
    return found


@pytest.mark.parametrize("servers", [None, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", ["push_pull", pytest.param("barrier", marks=pytest.mark.long), "new_group"])
def test_shutdown_while_other_threads_wait_for_a_rank(what, servers):
    ended, seconds = harness.run(meets_a_shutdown_while_it_waits, what, workers=2, servers=servers, env=ENV)[0]
    assert len(ended) == 3
    assert set(ended) <= {"NotInitializedError", "PeerLostError"}
    assert seconds < SOON_S


def is_shut_down_in_init(bps: Any) -> tuple[str, float, bool]:
    before = open_things()
    started = threading.Event()
    asked = 0.0

    def stop() -> None:
        nonlocal asked
        started.wait()
        harness.eventually(lambda: harness.is_blocked(os.getpid()), 30, "the call of init()")
        asked = time.monotonic()
        bps.shutdown()

    thread = threading.Thread(target=stop)
    thread.start()
    started.set()
    try:
        bps.init()
        kind = "nothing"
    except bps.NotInitializedError as error:
        kind = str(error)
    came = time.monotonic() - asked
    thread.join()
    return kind, came, comes_back_to(before)


def test_another_thread_that_shuts_down_during_init():
    env = ENV | {"WORLD_SIZE": "2"}
    kind, seconds, clean = harness.run(is_shut_down_in_init, workers=1, env=env, init=False)[0]
    assert "before init() was complete" in kind
    assert seconds < SOON_S
    assert clean


@harness.on_ranks(workers=1, env=ENV, init=False)
def test_the_interpreter_ends_beside_daemon_threads(bps: Any) -> None:
    """The interpreter ends while daemon threads are within calls of every kind."""
    code = """
import atexit, sys, threading, time, numpy
atexit.register(time.sleep, 0.2)  # after the last handler of bps: the threads go on, and their calls raise
import bps_rdma as bps
bps.init()
sys.setswitchinterval(1e-6)  # any line of Python is one where a thread gives the lock away
def forever(call):
    while True:
        try:
            call()
        except bps.BpsError:
            pass
array = numpy.ones(1000, numpy.float32)
prepared = bps.prepare("push_pull", array.copy(), name="y")
for call in (bps.metrics, bps.barrier, lambda: bps.push_pull(array, name="x"), lambda: bps.new_group([0]), prepared):
    threading.Thread(target=forever, args=(call,), daemon=True).start()
time.sleep(0.2)
"""
    folder = os.environ["BPS_TEST_FOLDER"]
    for _ in range(8):
        assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == 0


# ---- Time-outs


@harness.on_ranks(workers=2, env=ENV)
def test_infinite_and_impossible_time_outs(bps: Any) -> None:
    array = np.ones(1000, np.float32)
    group = bps.new_group(range(bps.size()), "g")
    for timeout in (math.inf, 1e10, 1e300, 5e8):
        bps.push_pull(array, name="p", timeout=timeout)
        bps.push_pull_inplace(array, name="i", timeout=timeout)
        bps.push_pull_async(array, name="a", timeout=timeout).wait()
        bps.barrier(timeout=timeout)
        bps.barrier(group, timeout=timeout)
    for timeout in (-1.0, -1e-9, math.nan, -math.inf):
        with pytest.raises(bps.InvalidArgumentError, match="timeout"):
            bps.push_pull(array, name="p", timeout=timeout)
        with pytest.raises(bps.InvalidArgumentError, match="timeout"):
            bps.push_pull_async_inplace(array, name="a", timeout=timeout)
        with pytest.raises(bps.InvalidArgumentError, match="timeout"):
            bps.barrier(timeout=timeout)

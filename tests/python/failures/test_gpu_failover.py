# SPDX-License-Identifier: Apache-2.0
"""A server is lost while arrays of a GPU travel, and nobody notices: each result has the bits that it would have."""

import functools
import random
import signal
import time
from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
from bodies.gpu_failover import COUNT, Arrays, env, expect, train, values
from gpu_arrays import GpuArray, Kernel, fake
from harness import await_mark, mark

from bps_rdma import Int8

BYTES = 200_000
SHM_FIRST = pytest.mark.long_over("tcp")


def is_quiet(array: GpuArray) -> bool:
    before = array.read()
    time.sleep(0.2)  # what must not happen has had the time to
    return array.read().tobytes() == before.tobytes() and array.is_contained()


def test_nothing_changes_while_nothing_is_lost(transport: str) -> None:
    for result in harness.run(train, 5, workers=2, servers=2, env=env(transport)):
        assert result["size"] == 2
        assert result["device_bytes"] > 0


@pytest.mark.parametrize("victims", [["server 1"], ["server 0", "server 2"]])
def test_killed_servers_cost_nothing(transport: str, victims: list[str]) -> None:
    with harness.start(train, 30, workers=2, servers=3, env=env(transport)) as job:
        job.await_marks("step-10")
        for victim in victims:
            job.kill(victim)
        assert [result["size"] for result in job.values()] == [2, 2]
        job.helper_statuses(but=victims)


@SHM_FIRST
def test_a_stopped_server_costs_nothing(transport: str) -> None:
    """It goes on when all is over, and must not have written anything since."""
    with harness.start(train, 30, workers=3, servers=2, env=env(transport)) as job:
        job.await_marks("step-10")
        job.kill("server 0", signal.SIGSTOP)
        assert [result["size"] for result in job.values()] == [3, 3, 3]
        job.kill("server 0", signal.SIGKILL)
        job.helper_statuses(but=["server 0"])


def test_a_server_is_killed_while_the_ranks_of_hosts_sum_first() -> None:
    on_hosts = env("tcp") | {"BPS_TRANSPORT": "shm,tcp"}
    results = harness.run(train, 20, servers=2, env=on_hosts, **harness.on_hosts("aab"), kills="server 1", at="step-10")
    assert [result["size"] for result in results] == [3, 3, 3]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
def test_servers_that_die_at_any_moment(seed: int) -> None:
    """Three of four, in every layout and at any speed of the GPU. What comes when is drawn, and the results are not."""
    draw = random.Random(seed)
    transport = draw.choice(["shm", "tcp", "hosts"])
    options: dict[str, Any] = {"workers": draw.choice([2, 3]), "env": env(transport)}
    if transport == "hosts":
        options = harness.on_hosts(draw.choice(["aabb", "ab", "aab"]))
        options["env"] = env("tcp") | {"BPS_TRANSPORT": "shm,tcp"}
    options["env"] |= harness.cut_at(draw.choice([16384, 131072]))
    delay_us = draw.choice([1, 200, 2000])
    victims = [f"server {i}" for i in draw.sample(range(4), 3)]
    with harness.start(train, 12 if delay_us == 2000 else 25, delay_us, servers=4, **options) as job:
        job.await_marks("step-5")
        for victim in victims:
            time.sleep(draw.random() * 0.6)
            job.kill(victim)
        assert len({result["size"] for result in job.values()}) == 1
        job.helper_statuses(but=victims)


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.long)])
@SHM_FIRST
@harness.on_ranks(
    "transport", workers=2, servers=2, env=functools.partial(env, BPS_PUSH_THREAD="1"), kills="server 1", at="started"
)
def test_a_late_gpu_is_waited_for_in_the_next_view(bps: Any, waits: bool) -> None:
    """Rank 1's kernel ends after the view, or when the next one has begun."""
    array = GpuArray(BYTES, "uint8", fake().fake_stream())
    array.write(3)
    bps.barrier()
    kernel = Kernel(array, 4) if bps.rank() == 1 else None
    handle = bps.push_pull_async_inplace(array, name="x", average=False)
    mark("started")
    if kernel is not None:
        await_mark("killed")
        harness.eventually(handle.done, what="the end of the view")
        if waits:
            bps.barrier()
        kernel.let_go()
    elif waits:
        bps.barrier()
    handle.wait()
    assert (array.read() == 7).all()
    assert array.is_contained()


@pytest.mark.long
@SHM_FIRST
@harness.on_ranks(
    "transport", workers=2, servers=2, env=functools.partial(env, BPS_PUSH_THREAD="1"), kills="server 1", at="started"
)
def test_a_late_gpu_meets_its_deadline_in_the_next_view(bps: Any) -> None:
    """Rank 1's kernel ends only after the deadline of what continues the operation in the next view."""
    array = GpuArray(BYTES, "uint8", fake().fake_stream())
    bps.barrier()
    kernel = Kernel(array, 4) if bps.rank() == 1 else None
    handle = bps.push_pull_async_inplace(array, name="x", average=False, timeout=3)
    mark("started")
    await_mark("killed")
    with pytest.raises(bps.DeadlineError) as raised:
        handle.wait()
    assert is_quiet(array)
    if kernel is not None:
        kernel.let_go()
        harness.eventually(lambda: bool((array.read() == 4).all()), what="the kernel")
        assert is_quiet(array)
    bps.barrier()
    array.write(5)
    bps.push_pull_inplace(array, name="x", average=False)
    assert (array.read() == 10).all()
    assert "x'" in str(raised.value)


def broken_gpu(bps: Any) -> str:
    """Rank 1's GPU fails when the view has ended."""
    array = GpuArray(BYTES, "uint8")
    bps.barrier()
    handle = bps.push_pull_async_inplace(array, name="x") if bps.rank() == 1 else None
    mark("started")
    await_mark("killed")
    if handle is not None:
        harness.eventually(handle.done, what="the end of the view")
        fake().fake_break()
    with pytest.raises(bps.BpsError) as raised:
        handle.wait() if handle is not None else bps.push_pull_inplace(array, name="x")
    return f"{type(raised.value).__name__} {raised.value}"


@SHM_FIRST
def test_a_gpu_that_fails_in_between_is_an_error_on_all_ranks(transport: str) -> None:
    texts = harness.run(broken_gpu, workers=2, servers=2, env=env(transport), kills="server 1", at="started")
    assert texts[1].startswith("TransportError"), texts[1]
    assert all("illegal memory access" in text for text in texts), texts


def fails_once(bps: Any, steps: int, compression: Any) -> dict[str, Any]:
    """What a loss costs that is not of servers alone, or of something that servers keep."""
    fake().fake_delay(200)
    arrays = [GpuArray(COUNT, "float32") for _ in range(3)]
    texts, step = [], 0
    while step < steps:
        failure = None
        for one in arrays:
            one.write(1 + bps.rank())
        handles = []
        try:
            for i, one in enumerate(arrays):  # the loss may be known before one of them begins
                handles.append(bps.push_pull_async_inplace(one, name=f"t{i}", average=False, compression=compression))
        except bps.RoundAbortedError as raised:
            failure = raised
        for handle in handles:
            try:
                handle.wait()
            except bps.RoundAbortedError as raised:
                failure = raised
        if failure is not None:
            texts.append(str(failure))
            assert all(is_quiet(one) for one in arrays)
            continue
        size = bps.size()
        assert all(abs(one.read() - size * (size + 1) / 2).max() < 0.1 for one in arrays)
        step += 1
        if step % 10 == 0:
            mark(f"step-{step}")
    return {"failures": len(texts), "size": bps.size()}


@pytest.mark.parametrize("compression", [None, Int8(everywhere=True)])
@SHM_FIRST
def test_arrays_are_quiet_after_what_is_not_survived(transport: str, compression: Any) -> None:
    """The loss of a rank, beside that of a server; and a server that had feedback."""
    victims = ["server 1"] if compression else ["rank 2", "server 1"]
    with harness.start(fails_once, 40, compression, workers=3, servers=2, env=env(transport)) as job:
        job.await_marks("step-20")
        for victim in victims:
            job.kill(victim)
        for value in job.values(but=[] if compression else [2]):
            assert value["size"] == (3 if compression else 2)
            assert 1 <= value["failures"] <= len(victims)


@harness.on_ranks("transport", workers=2, servers=2, env=env, kills="server 1", at="step-20")
def test_arrays_in_cpu_memory_do_not_notice_either(bps: Any) -> None:
    """Arrays in CPU memory, in a job whose GPUs the core copies."""
    array = np.empty(COUNT)
    for step in range(60):
        array[:] = values(bps.rank(), step)
        bps.push_pull_inplace(array, name="x", average=False)
        expect(array, values(0, step) + values(1, step), step)
        if step % 10 == 0:
            mark(f"step-{step}")
    assert bps.size() == 2


def prepared_in_place(bps: Any, steps: int) -> bool:
    """A prepared operation whose view ends while its copies are under way, and that is dropped then."""
    fake().fake_delay(500)
    arrays = Arrays(bps)
    prepared = bps.prepare("push_pull", arrays.array, average=False, name="prepared")
    for step in range(1, steps + 1):
        arrays.array.write(values(bps.rank(), step))
        prepared()
        expect(arrays.array, values(0, step) + values(1, step), step)
        if step % 10 == 0:
            mark(f"step-{step}")
            prepared = bps.prepare("push_pull", arrays.array, average=False, name="prepared")
    return True


@SHM_FIRST
def test_prepared_operations_follow(transport: str) -> None:
    with harness.start(prepared_in_place, 60, workers=2, servers=3, env=env(transport)) as job:
        for victim, step in (("server 2", 20), ("server 0", 40)):
            job.await_marks(f"step-{step}")
            job.kill(victim)
        assert job.values() == [True, True]


def warnings_of_gpudirect(bps: Any) -> None:
    for step in range(2):
        array = gpu_arrays.of(np.ones(COUNT, np.float32))
        bps.push_pull_inplace(array, average=False, name="x")
        assert (array.read() == 2).all()
        if step == 0:
            mark("summed")
            await_mark("goes on")


@pytest.mark.parametrize("failover", ["auto", "0"])
def test_gpudirect_gives_way_and_says_so(failover: str) -> None:
    settings = env("tcp", BPS_GPUDIRECT="1", BPS_SERVER_FAILOVER=failover)
    with harness.start(warnings_of_gpudirect, workers=2, servers=2, env=settings) as job:
        job.await_marks("summed")
        if failover == "auto":
            job.kill("server 1")
        job.set_mark("goes on")
        for outcome in job.outcomes():
            assert not outcome.error, outcome.error
            assert outcome.output.count("BPS_GPUDIRECT=1 has no effect") == (failover == "auto"), (
                "once, and in no later view"
            )

# SPDX-License-Identifier: Apache-2.0
"""A process that a rank forks is no member of the job: nothing that it does, or how it ends, touches its parent."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.children import in_child
from harness import is_marked, mark

from bps_rdma.unfinished import Unfinished

ENV = {"BPS_TIMEOUT": str(30 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(20 * harness.PATIENCE)}

SERVERS = pytest.mark.parametrize("servers", [None, 1])


def as_program(_: Any, name: str, *args: Any) -> Any:
    """Calls the function of this file in an interpreter of its own: only there sys.exit() is the real one."""
    code = f"""
import sys; sys.path.extend({sys.path!r})
import pickle, bps_rdma, {__name__}
bps_rdma.init()
result = {__name__}.{name}(bps_rdma, *{args!r})
bps_rdma.shutdown()
sys.stdout.buffer.write(pickle.dumps(result))
"""
    folder = os.environ["BPS_TEST_FOLDER"]
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, check=True)
    return pickle.loads(found.stdout)


def run(function: Callable[..., Any], *args: Any, workers: int = 2, servers: int | None = None) -> list[Any]:
    options = {"workers": workers, "servers": servers, "env": ENV, "init": False, "timeout": 80}
    return harness.run(as_program, function.__name__, *args, **options)


def still_works(bps: Any, name: str) -> bool:
    found = bps.push_pull(np.full(50_000, bps.rank() + 1.0, np.float32), average=False, name=name)
    bps.barrier()
    return bool((found == 3.0).all())


# ---- How a child ends


def forks_children(bps: Any) -> dict[str, tuple[list[int], bool]]:
    """How the children end that a rank forks, and whether it goes on beside them; by what the children do."""
    import bps_rdma.job

    def uses() -> None:
        assert not bps.is_initialized()
        for call in (bps.rank, bps.barrier, bps.metrics, lambda: bps.push_pull(np.ones(9), name="x")):
            with pytest.raises(bps.NotInitializedError, match="forked"):
                call()

    def destroys() -> None:
        inherited = bps_rdma.presence.of_parent
        inherited.clear()

    def uses_an_inherited_process() -> None:
        process = bps_rdma.presence.of_parent[0].process
        for call in (process.metrics, lambda: process.barrier(0, 1.0), lambda: process.rank, process.wait_for_end):
            try:
                call()
            except bps.NotInitializedError:
                continue
            raise AssertionError("the parent's process was used")

    def shuts_down() -> None:
        bps.shutdown()

    bodies: dict[str, Callable[[], object]] = {
        "sys.exit": lambda: sys.exit(0),
        "shutdown": shuts_down,
        "use": uses,
        "destroy": destroys,
        "inherited": uses_an_inherited_process,
    }
    still_works(bps, "before")
    return {how: ([in_child(body) for _ in range(3)], still_works(bps, how)) for how, body in bodies.items()}


@SERVERS
def test_a_forked_child_ends_at_once_and_harms_nobody(servers):
    for found in run(forks_children, servers=servers):
        assert found == dict.fromkeys(("sys.exit", "shutdown", "use", "destroy", "inherited"), ([0, 0, 0], True))


def stay_until_it_is_told() -> None:
    """A child that outlives its parent: until the other rank has heard of the end, or for long."""
    folder = Path(os.environ["BPS_TEST_FOLDER"])
    try:
        harness.eventually(lambda: is_marked("told", 0) or not folder.exists())
    except harness.WaitedInVainError:
        mark("has ended")


def is_killed_beside_its_child(bps: Any) -> str:
    """A child holds no copy of its parent's connections: they end with the parent."""
    still_works(bps, "before")
    if bps.rank() == 1:
        if os.fork() == 0:
            os.setsid()
            stay_until_it_is_told()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(bps.PeerLostError) as error:
        bps.push_pull(np.ones(10, np.float32), name="after")
    assert not is_marked("has ended", 1), "it was told only when the child had ended"
    mark("told")
    return str(error.value)


@SERVERS
def test_a_parent_that_dies_is_lost_at_once_although_its_child_lives(servers):
    env = ENV | {"BPS_HEARTBEAT_TIMEOUT": "100"}  # silence is not what tells
    with harness.start(is_killed_beside_its_child, workers=2, servers=servers, env=env) as job:
        outcome = job.outcomes(but=[1])[0]
        job.helper_statuses()
    assert not outcome.error, outcome.error
    assert "worker 1" in outcome.value


FORKS = 15 if os.environ.get("BPS_TEST_ALL") else 6


def forks_while_others_work(bps: Any) -> tuple[list[int], bool]:
    """Forks at any moment of the work of other threads."""
    array = np.ones(20_000, np.float32)
    over = threading.Event()

    def work(number: int) -> None:
        while not over.is_set():
            bps.push_pull(array, name=f"t{number}")
            bps.metrics()
            bps.empty(1000)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    statuses = [in_child(lambda: bps.empty(1000).fill(1)) for _ in range(FORKS)]
    over.set()
    for thread in threads:
        thread.join()
    return statuses, still_works_alone(bps)


def still_works_alone(bps: Any) -> bool:
    return bool((bps.push_pull(np.ones(100, np.float32), name="alone") == 1).all())


def test_forks_while_other_threads_work():
    assert run(forks_while_others_work, workers=1) == [([0] * FORKS, True)]


# ---- Jobs of a child


def child_has_a_job_of_its_own(bps: Any) -> tuple[int, bool]:
    still_works(bps, "before")

    def own_job() -> None:
        for name in [name for name in os.environ if name.startswith(("BPS_JOB", "DMLC_", "RANK", "WORLD", "LOCAL_"))]:
            del os.environ[name]
        bps.init()
        assert (bps.rank(), bps.size()) == (0, 1)
        shared = bps.empty(100_000)
        shared[:] = 7
        assert (bps.push_pull(shared, name="x") == 7).all()
        assert (bps.push_pull(inherited, name="y") == 5).all()
        bps.shutdown()

    inherited = bps.empty(100_000)
    inherited[:] = 5
    status = in_child(own_job)
    return status, still_works(bps, "after")


@SERVERS
def test_a_child_can_join_a_job_of_its_own(servers):
    found = run(child_has_a_job_of_its_own, servers=servers)
    assert found == [(0, True)] * 2


# ---- Memory


def child_writes_to_shared_memory(bps: Any) -> tuple[int, bool, bool]:
    array = bps.empty(1_000_000)
    array[:] = bps.rank() + 1
    bps.push_pull_inplace(array, average=False, name="shared")
    handle = bps.push_pull_async_inplace(array, average=False, name="shared")

    def reads_and_writes() -> None:
        assert array[5] in (3.0, 6.0)
        array[:] = 1000
        assert (array == 1000).all()

    status = in_child(reads_and_writes)
    bps.synchronize(handle)
    return status, bool((array == 6).all()), still_works(bps, "after")


@SERVERS
def test_what_a_child_writes_stays_its_own(servers):
    found = run(child_writes_to_shared_memory, servers=servers)
    assert found == [(0, True, True)] * 2


def child_waits_for_a_handle(bps: Any) -> tuple[int, bool]:
    handle = None
    if bps.rank() == 0:
        handle = bps.push_pull_async(np.ones(100_000, np.float32), name="pending", average=False)

    def waits() -> None:
        assert handle is not None
        assert handle.done()
        try:
            handle.wait()
        except bps.NotInitializedError:
            return
        raise AssertionError("a child waited for its parent's operation")

    status = in_child(waits) if handle is not None else 0
    if handle is None:
        handle = bps.push_pull_async(np.ones(100_000, np.float32), name="pending", average=False)
    return status, bool((handle.wait() == 2).all())


def test_a_child_does_not_wait_for_its_parents_operations():
    assert run(child_waits_for_a_handle) == [(0, True)] * 2


# ---- Ways to make child processes


def work_of_a_child(shared: Any) -> float:
    import bps_rdma

    assert not bps_rdma.is_initialized()
    return float(shared.sum()) if shared is not None else 0.0


def uses_multiprocessing(bps: Any, method: str) -> tuple[list[float], bool]:
    shared = bps.empty(1000)
    shared[:] = 2
    still_works(bps, "before")
    context: Any = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        found = pool.map(work_of_a_child, [shared, None, shared])
    return found, still_works(bps, "after")


@SERVERS
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method, servers):
    found = run(uses_multiprocessing, method, servers=servers)
    assert found == [([2000.0, 0.0, 2000.0], True)] * 2


def uses_subprocess(bps: Any) -> tuple[bool, bool]:
    """Programs inherit none of our descriptors, even if all are to be inherited."""
    before = 5  # the three standard ones, that of the listing, and one more
    still_works(bps, "before")
    code = "import os; print(len(os.listdir('/proc/self/fd')))"
    counts = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, close_fds=False, **options
        ).stdout
        for options in ({}, {"preexec_fn": lambda: None})
    ]
    none = all(int(count) <= before for count in counts)
    return none, still_works(bps, "after")


@SERVERS
def test_subprocess(servers):
    assert run(uses_subprocess, servers=servers) == [(True, True)] * 2


# ---- What the parent has dropped


def leaves_what_its_parent_dropped(bps: Any) -> int:
    """A child that leaves a job of its own must not wait for operations of its parent."""
    if bps.rank() == 0:
        bps.push_pull_async(np.ones(100), False, name="x")  # its handle is dropped
        child = os.fork()
        if child == 0:
            try:
                Unfinished().finish_dropped(1e9)
                os._exit(0)
            finally:
                os._exit(1)
        status = harness.eventually(lambda: os.waitpid(child, os.WNOHANG), 30, "its end", until=lambda ended: ended[0])
        harness.mark("forked")
        return status[1]
    harness.await_mark("forked", 0)
    return int(bps.push_pull(np.ones(100), name="x", average=False)[0])


def test_a_child_does_not_wait_for_what_its_parent_dropped():
    assert harness.run(leaves_what_its_parent_dropped, workers=2) == [0, 2]

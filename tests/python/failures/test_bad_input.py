# SPDX-License-Identifier: Apache-2.0
"""Bad input and bad start-ups: each is a specific exception with a hint, within its deadline, and nothing is lost."""

import time
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

import bps_rdma


def expect(kind: type[Exception], call: Any, *parts: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert getattr(caught.value, "hint", ""), f"no hint: {text}"
    for part in parts:
        assert part in text, text


def test_arrays_that_cannot_be_synchronised(alone):
    bps = alone
    invalid = bps.InvalidTensorError
    expect(invalid, lambda: bps.push_pull(np.ones(3, np.complex64)), "complex64")
    expect(invalid, lambda: bps.push_pull(np.ones(3, ">f4")), ">f4")
    expect(invalid, lambda: bps.push_pull(np.ones((4, 4))[:, 1]), "contiguous")
    expect(invalid, lambda: bps.push_pull([1.0, 2.0]), "list")
    frozen = np.ones(3)
    frozen.flags.writeable = False
    expect(invalid, lambda: bps.push_pull_inplace(frozen), "read-only")
    assert bps.push_pull(frozen).tolist() == [1, 1, 1]
    expect(invalid, lambda: bps.push_pull_inplace(b"bytes"), "read-only")
    expect(invalid, lambda: bps.push_pull(np.ones(3, bool), average=True), "bool")
    expect(invalid, lambda: bps.all_gather(np.ones(2), out=np.ones(3)), "part")
    assert bps.push_pull(np.ones(2)).tolist() == [1, 1]  # all of that harmed nothing


def test_names_handles_groups(alone):
    bps = alone
    bps.push_pull(np.ones(3, np.float32), name="w")
    expect(bps.MismatchError, lambda: bps.push_pull(np.ones(4, np.float32), name="w"), "'w'", "(3,)", "(4,)")
    expect(bps.MismatchError, lambda: bps.push_pull(np.ones(3), name="w"), "float32", "float64")
    expect(bps.UnknownHandleError, lambda: bps.synchronize(17))
    handle = bps.push_pull_async(np.ones(3), name="h")
    bps.synchronize(handle)
    expect(bps.UnknownHandleError, lambda: bps.synchronize(handle))
    expect(bps.UnknownHandleError, lambda: bps.poll(handle))
    expect(bps.InvalidArgumentError, lambda: bps.new_group([0, 0]))
    expect(bps.InvalidArgumentError, lambda: bps.new_group([3]), "[3]")
    expect(bps.InvalidArgumentError, lambda: bps.broadcast(np.ones(1), root=5), "root=5")
    expect(bps.InvalidArgumentError, lambda: bps.barrier(bps.Group(9, (0,))), "group")


def test_before_init_and_after_shutdown():
    calls = [bps_rdma.rank, bps_rdma.size, bps_rdma.barrier, bps_rdma.metrics, lambda: bps_rdma.push_pull(np.ones(1))]
    for call in calls:
        expect(bps_rdma.NotInitializedError, call, "init()")
    bps_rdma.init()
    assert bps_rdma.is_initialized()
    bps_rdma.shutdown()
    bps_rdma.shutdown()
    for call in calls:
        expect(bps_rdma.NotInitializedError, call, "init()")


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"BPS_TRANSPORT": "carrier-pigeon"}, ("carrier-pigeon", "shm")),
        ({"BYTEPS_PARTITION_BYTES": "lots"}, ("BYTEPS_PARTITION_BYTES", "lots")),
        ({"BYTEPS_KEY_HASH_FN": "md5"}, ("md5", "djb2")),
        ({"BPS_TIMEOUT": "-1"}, ("BPS_TIMEOUT",)),
        ({"WORLD_SIZE": "2"}, ("RANK",)),
        ({"RANK": "5", "WORLD_SIZE": "2"}, ("rank 5",)),
        ({"DMLC_ROLE": "server"}, ("DMLC_ROLE", "bps-server")),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}, ("DMLC_PS_ROOT_PORT",)),
        ({"BPS_INTERFACE": "nosuch0"}, ("nosuch0",)),
    ],
)
def test_settings_that_make_no_sense(monkeypatch, variables, parts):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expect(bps_rdma.InvalidArgumentError, bps_rdma.init, *parts)
    assert not bps_rdma.is_initialized()


def classic(port: int, **more: str) -> dict[str, str]:
    return {
        "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_WORKER_ID": "0",
        "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "BPS_JOIN_TIMEOUT": "2", **more,
    }  # fmt: skip


def test_no_scheduler_within_the_deadline(monkeypatch):
    for name, value in classic(harness.free_port()).items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    expect(bps_rdma.UnreachableError, bps_rdma.init, "127.0.0.1")
    assert time.monotonic() - begin > 1


def sums_when_told(bps: Any) -> float:
    mark("ready")
    await_mark("go")
    return float(bps.push_pull(np.ones(1000), average=False)[0])


@pytest.mark.parametrize(("secret", "job"), [("wrong", None), pytest.param(None, "another", marks=pytest.mark.long)])
def test_unauthenticated_workers_are_refused_and_the_job_goes_on(monkeypatch, secret, job):
    with harness.start(sums_when_told, workers=2, servers=1) as running:
        running.await_marks("ready")
        for name, value in classic(running.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("BPS_SECRET", secret or running.name)
        monkeypatch.setenv("BPS_JOB_ID", job or running.name)
        monkeypatch.setenv("BPS_JOIN_TIMEOUT", str(20 * harness.PATIENCE))
        expect(bps_rdma.AuthenticationError, bps_rdma.init)
        running.set_mark("go")
        assert running.results() == [2.0, 2.0]


def test_a_port_that_is_taken(monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("BPS_ROOT_PORT", str(taken.getsockname()[1]))
        expect(bps_rdma.PortTakenError, bps_rdma.init, str(taken.getsockname()[1]))


def disagree(bps: Any, how: str) -> tuple[str, str]:
    rank = bps.rank()
    try:
        if how == "shape":
            bps.push_pull(np.ones(3 + rank, np.float32), name="w")
        elif how == "dtype":
            bps.push_pull(np.ones(4, np.float32 if rank == 0 else np.int32), name="w")
        elif how == "operation":
            (bps.push_pull if rank == 0 else bps.broadcast)(np.ones(4), name="w")
        elif how == "average":
            bps.push_pull(np.ones(4), average=rank == 0, name="w")
    except bps.BpsError as error:
        good = bps.push_pull(np.ones(5), average=False, name="other")  # the job goes on
        assert good.tolist() == [2.0] * 5
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("how", ["shape", "dtype", "operation", "average"])
def test_ranks_that_disagree(how):
    for kind, text in harness.run(disagree, how, workers=2):
        assert kind == "MismatchError", text
        assert "'w'" in text
        assert "rank 0" in text
        assert "rank 1" in text


def disagree_often(bps: Any, times: int) -> list[str]:
    """Whoever declares first hears of the disagreement later: before, while or after it starts its operation."""
    found = []
    for i in range(times):
        try:
            bps.push_pull(np.ones(4, np.float32 if bps.rank() == 0 else np.int32), average=False, name=f"w{i}")
            found.append("nothing")
        except bps.BpsError as error:
            found.append(type(error).__name__)
        bps.push_pull(np.ones(5), average=False, name="together")
    return found


def test_ranks_that_disagree_all_hear_of_it_every_time():
    for found in harness.run(disagree_often, 500, workers=2, env={"BPS_TIMEOUT": "20"}):
        assert set(found) == {"MismatchError"}


@pytest.mark.parametrize("what", ["push_pull", "barrier"])
@harness.on_ranks(workers=2, rank_env=[{"BPS_TIMEOUT": "1"}, {}])
def test_a_missing_rank_is_named_at_the_deadline(bps: Any, what: str) -> None:
    bps.push_pull(np.ones(4), name="w", timeout=60)
    if bps.rank() == 1:
        await_mark("told", 0)
        return
    begin = time.monotonic()
    with pytest.raises(bps.DeadlineError, match=r"ranks? 1"):
        bps.barrier(timeout=1) if what == "barrier" else bps.push_pull(np.ones(4), name="w")
    assert time.monotonic() - begin > 0.9
    mark("told")

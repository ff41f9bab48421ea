# SPDX-License-Identifier: Apache-2.0
"""`bps why` names whom a job waits for: hangs of all kinds, each with real processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster
import network
import numpy as np
import pytest
from rank_main import await_mark, mark
from test_rails import enter

from bps_rdma.inspection import local
from bps_rdma.inspection.commands import explain
from bps_rdma.inspection.diagnosis import Diagnosis
from bps_rdma.inspection.job_state import JobState, Member, gather

WORKERS = 3
COMMAND = [sys.executable, "-P", "-m", "bps_rdma"]
CULPRIT = 1


def state_of(job: cluster.Job) -> JobState | None:
    """Of this job; others may run on this machine, too."""
    pids = {job.pid(f"rank {rank}") for rank in range(job.workers)}
    for state in gather():
        if pids & {member.pid for member in state.members.values()}:
            return state
    return None


def why(job: cluster.Job, is_it: Callable[[Diagnosis], bool]) -> Diagnosis:
    """The first diagnosis that is right; the hang may not have begun when the first one is made."""
    deadline = time.monotonic() + 30 * cluster.PATIENCE
    while True:
        state = state_of(job)
        found = explain(state) if state is not None else Diagnosis("none", "no such job")
        if is_it(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def names(found: Diagnosis) -> list[int]:
    return [member.rank for member in found.culprits]


def stop(job: cluster.Job, member: str) -> None:
    """Returns when no thread of it runs any more: the one that gets the signal stops the others when it runs."""
    job.kill(member, signal.SIGSTOP)
    deadline = time.monotonic() + 30 * cluster.PATIENCE
    while local.state_of(job.pid(member)) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_hung(found: Diagnosis) -> bool:
    """The job has come to where in_python() and holds_the_gil() hang."""
    return found.kind == "rank" and len(found.waits) == WORKERS - 1 and names(found) == [CULPRIT]


def add(bps: Any, name: str) -> float:
    return float(bps.push_pull(np.ones(5000, np.float32), average=False, name=name)[0])


def end_all(job: cluster.Job) -> list[Any]:
    job.set_mark("go on")
    return job.results()


# ---- The hangs


def this_is_where_it_hangs() -> None:
    await_mark("go on")


def in_python(bps: Any) -> float:
    add(bps, "w")
    if bps.rank() == CULPRIT:
        this_is_where_it_hangs()
    return add(bps, "w")


@pytest.mark.parametrize("servers", [None, 1])
def test_a_rank_that_is_in_its_own_code(servers: int | None, transport: str) -> None:
    with cluster.Job(in_python, workers=WORKERS, servers=servers, env=cluster.over(transport)) as job:
        found = why(job, is_hung)
        assert found.waits[0].what == "push_pull of 'w', round 1"
        assert "this_is_where_it_hangs" in (found.culprits[0].report or {})["stacks"]
        assert end_all(job) == [WORKERS] * WORKERS
        pids = [job.pid(f"rank {rank}") for rank in range(WORKERS)]
    assert not [process for process in local.find() if process.pid in pids]


def holds_the_gil(bps: Any) -> float:
    """As a call of another library does that waits for a device and does not let go of Python."""
    if bps.rank() == CULPRIT:
        mark("hangs")
        ctypes.PyDLL(None).pause()
    return add(bps, "w")


def test_a_rank_whose_python_stands_still() -> None:
    with cluster.Job(holds_the_gil, workers=WORKERS) as job:
        found = why(job, is_hung)
        assert "holds_the_gil" in (found.culprits[0].report or {})["stacks"]
        job.kill(f"rank {CULPRIT}", signal.SIGUSR1)  # pause() returns
        assert job.results() == [WORKERS] * WORKERS


def kill_all(job: cluster.Job) -> None:
    for rank in range(WORKERS):
        with contextlib.suppress(ProcessLookupError):  # the loss of the others may have ended it
            job.kill(f"rank {rank}")


def in_another_collective(bps: Any) -> float:
    if bps.rank() == CULPRIT:
        bps.barrier()
    result = add(bps, "w")
    if bps.rank() != CULPRIT:
        bps.barrier()
    return result


def test_a_rank_in_another_collective() -> None:
    with cluster.Job(in_another_collective, workers=WORKERS, env={"BPS_TIMEOUT": "3600"}) as job:
        found = why(job, lambda found: found.kind == "order" and len(found.waits) == WORKERS)
        assert CULPRIT in names(found)
        assert "barrier of group 0" in found.text
        assert "push_pull of 'w', round 0" in found.text
        kill_all(job)
        job.outcomes()


def in_another_order(bps: Any) -> float:
    first, second = ("b", "a") if bps.rank() == CULPRIT else ("a", "b")
    return add(bps, first) + add(bps, second)


def test_ranks_that_call_in_different_orders() -> None:
    with cluster.Job(in_another_order, workers=WORKERS, servers=2, env={"BPS_TIMEOUT": "3600"}) as job:
        found = why(job, lambda found: found.kind == "order" and len(found.waits) == WORKERS)
        assert CULPRIT in names(found)
        assert "push_pull of 'a', round 0" in found.text
        assert "push_pull of 'b', round 0" in found.text
        assert "its deadline" not in found.text
        kill_all(job)
        job.outcomes()


def of_another_size(bps: Any) -> str:
    with pytest.raises(bps.MismatchError) as refused:
        bps.push_pull(np.ones(5 + bps.rank() % 2, np.float32), name="w")
    return str(refused.value)


def test_another_size_is_no_hang() -> None:
    """It is an error at once, on all ranks, that names tensor and ranks."""
    texts = cluster.run(of_another_size, workers=2, env={"BPS_TIMEOUT": "3600"}, timeout=60)
    assert all("'w'" in text and "rank 0" in text and "rank 1" in text for text in texts)


def sums_after(bps: Any) -> str:
    add(bps, "w")
    mark("ready")
    await_mark("stopped")
    add(bps, "w")
    return "done"


def stopped(member: str, workers: int, servers: int | None) -> tuple[Diagnosis, float]:
    with cluster.Job(sums_after, workers=workers, servers=servers) as job:
        job.await_marks("ready")
        stop(job, member)
        job.set_mark("stopped")
        found = why(job, lambda found: found.kind == "process" and bool(found.waits))
        began = time.monotonic()
        assert state_of(job) is not None
        took = time.monotonic() - began
        job.kill(member, signal.SIGCONT)
        assert job.results() == ["done"] * workers
        return found, took


@pytest.mark.parametrize(("member", "servers"), [("rank 1", None), ("rank 1", 1), ("server 0", 1), ("rank 0", None)])
def test_a_process_that_is_stopped(member: str, servers: int | None) -> None:
    """Of rank 0, which hosts the scheduler without dedicated servers, the others know enough."""
    found, took = stopped(member, 2, servers)
    assert [one.name for one in found.culprits] == [member]
    assert f"kill -CONT {found.culprits[0].pid}" in found.text
    assert took < 2 * cluster.PATIENCE


def sums_across(bps: Any, namespaces: list[str]) -> str:
    """Until the network is cut."""
    enter(namespaces[int(os.environ["RANK"])])
    bps.init()
    add(bps, "w")
    mark("ready")
    await_mark("stopped")
    bps.push_pull(np.ones(1 << 20, np.float32), name="large")
    bps.barrier()
    bps.shutdown()
    return "done"


def test_a_network_that_is_cut(networks: network.Network) -> None:
    """Between two hosts, in one direction, and not to the scheduler: rank 1 has sent its part, and it is lost."""
    namespaces = [networks.namespace(member) for member in network.PAIR]
    address = networks.address("rank 0", "control")
    env = {"BPS_TRANSPORT": "tcp", "BPS_INTERFACE": "data", "MASTER_ADDR": address, "LOCAL_WORLD_SIZE": "1"}
    with cluster.start(sums_across, namespaces, workers=2, env=env, init=False) as job:
        job.await_marks("ready")
        networks.cut("rank 1", "data", "out")
        job.set_mark("stopped")
        seen = []  # what it said until it was right
        deadline = time.monotonic() + 30 * cluster.PATIENCE
        while True:
            program = [*networks.inside("rank 0"), *COMMAND, "why", "--json"]
            done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
            found = json.loads(done.stdout) or [{"kind": "not even a job"}]  # a busy process may be late
            if found[0]["kind"] == "network":
                break
            seen.append((found[0].get("text"), done.stderr))
            assert time.monotonic() < deadline, seen
            time.sleep(0.1)
        assert 1 in [one["rank"] for one in found[0]["culprits"]]
        assert "has not arrived" in found[0]["text"]
        networks.mend("data")
        assert job.results() == ["done", "done"]


def meets(bps: Any) -> bool:
    add(bps, "w")
    mark("ready")
    await_mark("stopped")
    bps.barrier()
    return True


def test_the_scheduler_is_stopped() -> None:
    with cluster.Job(meets, workers=2, servers=1) as job:
        job.await_marks("ready")
        stop(job, "scheduler")
        job.set_mark("stopped")
        found = why(job, lambda found: found.kind == "scheduler" and len(found.waits) == 2)
        assert found.waits[0].what == "the barrier of group 0"
        assert not found.culprits
        job.kill("scheduler", signal.SIGCONT)
        assert job.results() == [True, True]


def has_lost_it(member: Member) -> bool:
    return bool((member.report or {"job": {}})["job"].get("why_scheduler_lost"))


def test_the_scheduler_is_gone() -> None:
    env = {"BPS_MIN_WORKERS": "2", "BPS_HEARTBEAT_TIMEOUT": "20"}
    with cluster.Job(in_python, workers=2, servers=1, env=env) as job:
        why(job, lambda found: names(found) == [CULPRIT])
        job.kill("scheduler")
        deadline = time.monotonic() + 30 * cluster.PATIENCE
        while (state := state_of(job)) is None or not any(has_lost_it(one) for one in state.members.values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert state.scheduler is None
        found = explain(state)
        assert (found.kind, names(found)) == ("rank", [CULPRIT])  # the sums do not need a scheduler
        job.set_mark("go on")
        job.outcomes()


def test_a_job_that_has_not_begun() -> None:
    with cluster.Job(in_python, workers=2, servers=1, env={"DMLC_NUM_SERVER": "2"}) as job:
        deadline = time.monotonic() + 30 * cluster.PATIENCE
        while not (found := explain(state) if (state := unjoined(job)) else Diagnosis("none", "")).text.count("server"):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert found.kind == "starting"
        assert "1 of 2 servers" in found.text
        for rank in range(2):
            job.kill(f"rank {rank}")
        job.outcomes()


def unjoined(job: cluster.Job) -> JobState | None:
    pids = {job.pid("rank 0"), job.pid("rank 1")}
    for state in gather():
        if pids & {report["pid"] for report in state.unplaced}:
            return state
    return None


# ---- The commands


def command(*words: str, env: dict[str, str] | None = None) -> str:
    variables = {**os.environ, **(env or {})}
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=60, env=variables)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_scheduler_of_a_job_elsewhere_is_asked_by_its_address(tmp_path: Path) -> None:
    with cluster.Job(in_python, workers=WORKERS, servers=1) as job:
        why(job, is_hung)
        address = f"127.0.0.1:{job.port}"
        env = {"BPS_JOB_ID": job.name, "BPS_SECRET": job.name}
        (explained,) = json.loads(command("why", address, "--json", env=env))
        assert explained["kind"] == "rank"
        assert [one["rank"] for one in explained["culprits"]] == [CULPRIT]
        assert "this_is_where_it_hangs" in explained["stacks"]["rank 1"]
        assert "Rank 1" in command("why", address, env=env)
        (explained,) = json.loads(command("why", "--job", job.name, "--json"))
        assert [one["rank"] for one in explained["culprits"]] == [CULPRIT]
        seen = json.loads(command("top", address, "--json", env=env))
        states = {row["name"]: (row["state"], row["awaited_by"]) for row in seen["members"]}
        assert states == {
            "rank 0": ("waiting", 0), "rank 1": ("running", 2), "rank 2": ("waiting", 0), "server 0": ("running", 0)
        }  # fmt: skip
        assert "rank 1" in command("top", address, "--once", env=env)
        file = tmp_path / "job.json"
        command("dump", address, "--stacks", "-o", str(file), env=env)
        end_all(job)
    (explained,) = json.loads(command("why", str(file), "--json"))
    assert [one["rank"] for one in explained["culprits"]] == [CULPRIT]
    assert "this_is_where_it_hangs" in explained["stacks"]["rank 1"]


def test_without_the_secret_nobody_is_told() -> None:
    with cluster.Job(in_python, workers=2, servers=1) as job:
        why(job, lambda found: names(found) == [CULPRIT])
        program = [*COMMAND, "why", f"127.0.0.1:{job.port}"]
        env = {**os.environ, "BPS_JOB_ID": job.name, "BPS_SECRET": "another one"}
        done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60, env=env)
        assert done.returncode == 1
        assert "secret" in done.stderr
        assert "push_pull" not in done.stdout
        end_all(job)


def test_only_this_user_may_ask() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with cluster.Job(in_python, workers=2, servers=1) as job:
        why(job, lambda found: names(found) == [CULPRIT])
        (process,) = (one for one in local.find() if one.pid == job.pid("rank 0"))
        ask = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
            "s.connect(bytes.fromhex(sys.argv[1])); s.sendall(b'report\\n'); sys.stdout.write(repr(s.recv(100)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", ask, process.address.hex()], capture_output=True, text=True, check=False
        )
        assert done.stdout in ("b''", ""), done.stdout
        assert local.ask(process, "report", 5 * cluster.PATIENCE) is not None
        end_all(job)


def fails(bps: Any) -> str:
    if bps.rank() == CULPRIT:
        await_mark("go on")
        return "late"
    with pytest.raises(bps.DeadlineError) as error:
        bps.push_pull(np.ones(9, np.float32), name="w")
    return str(error.value)


def test_a_rank_whose_operation_fails_leaves_a_file(tmp_path: Path) -> None:
    with cluster.Job(fails, workers=2, servers=1, env={"BPS_DUMP_DIR": str(tmp_path), "BPS_TIMEOUT": "0.5"}) as job:
        deadline = time.monotonic() + 30 * cluster.PATIENCE
        while not (files := list(tmp_path.glob("*.json"))) or not files[0].read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = job.pid("rank 0")
        end_all(job)
    (file,) = files
    assert file.name.endswith(f"-{pid}.json")
    assert file.stat().st_mode & 0o077 == 0
    report = json.loads(file.read_text())
    (last,) = [one for one in report["recent"] if one["name"] == "w"]
    assert (last["kind"], last["round"], last["bytes"]) == ("push_pull", 0, 36)
    assert "most recent call first" in report["stacks"]
    assert last["state"] != "done"
    assert "Rank 0 failed: " in command("why", str(tmp_path)), report["last_failure"]


def test_bad_input() -> None:
    for words, text in (
        (["why", "nowhere"], "no address"),
        (["top", "host:0"], "no address"),
        (["why", "/dev/null"], "no report"),
    ):
        done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""`bps why` names whom a job waits for: hangs of all kinds, each with real processes."""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
from bodies.rails import enter
from harness import await_mark, mark, network

from bps_rdma.tools.inspection import local
from bps_rdma.tools.inspection.commands import explain
from bps_rdma.tools.inspection.diagnosis import Diagnosis, waits_of
from bps_rdma.tools.inspection.job_state import JobState, Member, gather

WORKERS = 3
COMMAND = [sys.executable, "-P", "-m", "bps_rdma"]
CULPRIT = 1
LONG = bool(os.environ.get("BPS_TEST_ALL"))
MOST_S = 4.0 * harness.PATIENCE  # measured with --all only; 2 s on a machine with nothing else to do
SETTLES_S = 2.0
OTHERS = (0, 2)
ROUND_1 = "push_pull of 'w', round 1"


def state_of(job: harness.Job) -> JobState | None:
    """Of this job; others may run on this machine, too."""
    pids = {job.pid(f"rank {rank}") for rank in range(job.workers)}
    for state in gather():
        if pids & {member.pid for member in state.members.values()}:
            return state
    return None


def answer(
    job: harness.Job,
    hangs: Callable[[JobState | None], bool],
    inside: Sequence[str] = (),
    env: dict[str, str] | None = None,
    settles: float = SETTLES_S,
) -> dict[str, Any]:
    """What the command `bps why` says first, once the job has hung for two seconds.

    On a quiet machine it says so within two seconds, with the stacks, from the start of its process to its end.
    """
    if not inside:  # from outside nothing is reached
        job.eventually(lambda: state_of(job), 30, "the hang", until=hangs)
    time.sleep(settles)
    program = [*inside, *COMMAND, "why", "--json", "--job", job.name]
    began = time.monotonic()
    done = harness.run_command(program, env=env)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr + done.stdout
    assert took < MOST_S or not LONG, took
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


def ranks_that_wait(*ranks: int, for_what: str = "") -> Callable[[JobState | None], bool]:
    return lambda state: (
        state is not None and {wait.rank for wait in waits_of(state) if for_what in wait.what} == set(ranks)
    )


def ranks_of(found: dict[str, Any]) -> list[int]:
    return [one["rank"] for one in found["culprits"]]


def explained(state: JobState | None) -> Diagnosis:
    return explain(state) if state is not None else Diagnosis("none", "no such job")


def await_hang(job: harness.Job) -> None:
    """Until the job has come to where in_python() hangs. In round 0, too, the others may wait for the culprit."""
    job.await_marks("hangs", [CULPRIT])
    others = set(range(job.workers)) - {CULPRIT}
    job.eventually(lambda: state_of(job), 30, "the hang", until=ranks_that_wait(*others, for_what=ROUND_1))


def add(bps: Any, name: str) -> float:
    return float(bps.push_pull(np.ones(5000, np.float32), average=False, name=name)[0])


def end_all(job: harness.Job) -> list[Any]:
    job.set_mark("go on")
    return job.results()


# ---- The hangs


def this_is_where_it_hangs() -> None:
    mark("hangs")
    await_mark("go on")


def in_python(bps: Any) -> float:
    add(bps, "w")
    if bps.rank() == CULPRIT:
        this_is_where_it_hangs()
    return add(bps, "w")


@pytest.mark.parametrize(
    ("servers", "transport"),
    [
        (None, "shm"),
        (1, "tcp"),
        pytest.param(1, "shm", marks=pytest.mark.long),
        pytest.param(None, "tcp", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_in_its_own_code(servers: int | None, transport: str) -> None:
    with harness.start(in_python, workers=WORKERS, servers=servers, env=harness.over(transport)) as job:
        await_hang(job)
        found = answer(job, ranks_that_wait(*OTHERS))
        assert (found["kind"], ranks_of(found)) == ("rank", [CULPRIT])
        assert found["operation"] == ROUND_1
        assert "this_is_where_it_hangs" in found["stacks"]["rank 1"]
        assert end_all(job) == [WORKERS] * WORKERS
        pids = [job.pid(f"rank {rank}") for rank in range(WORKERS)]
    assert not [process for process in local.find() if process.pid in pids]


def test_a_deadline_that_is_far_away() -> None:
    """Nothing fails for an hour; it is named all the same, and with it when it would have failed."""
    with harness.start(in_python, workers=2, env={"BPS_TIMEOUT": "3600"}) as job:
        await_hang(job)
        found = answer(job, ranks_that_wait(0))
        assert (found["kind"], ranks_of(found)) == ("rank", [CULPRIT])
        assert re.search(r"its deadline is in 35\d\d s", found["text"])
        assert 2000 <= found["since_ms"] < 60_000 * harness.PATIENCE
        assert "this_is_where_it_hangs" in found["stacks"]["rank 1"]
        end_all(job)


def holds_the_gil(bps: Any) -> float:
    """As a call of another library does that waits for a device and does not let go of Python."""
    if bps.rank() == CULPRIT:
        mark("hangs")
        ctypes.PyDLL(None).pause()
    return add(bps, "w")


def test_a_rank_whose_python_stands_still() -> None:
    with harness.start(holds_the_gil, workers=WORKERS) as job:
        job.await_marks("hangs", [CULPRIT])
        found = answer(job, ranks_that_wait(*OTHERS))
        assert (found["kind"], ranks_of(found)) == ("rank", [CULPRIT])
        assert "holds_the_gil" in found["stacks"]["rank 1"]
        job.kill(f"rank {CULPRIT}", signal.SIGUSR1)  # pause() returns
        assert job.results() == [WORKERS] * WORKERS


def answer_about_order(body: Callable[..., float], servers: int | None = None) -> dict[str, Any]:
    """What is said of ranks that all wait, each for something that the others do not do next."""
    with harness.start(body, workers=WORKERS, servers=servers, env={"BPS_TIMEOUT": "3600"}) as job:
        found = answer(job, ranks_that_wait(*range(WORKERS)))
        for rank in range(WORKERS):
            with contextlib.suppress(ProcessLookupError):  # the loss of the others may have ended it
                job.kill(f"rank {rank}")
        job.outcomes()
    assert found["kind"] == "order"
    assert CULPRIT in ranks_of(found)
    return found


def in_another_collective(bps: Any) -> float:
    if bps.rank() == CULPRIT:
        bps.barrier()
    result = add(bps, "w")
    if bps.rank() != CULPRIT:
        bps.barrier()
    return result


def test_a_rank_in_another_collective() -> None:
    found = answer_about_order(in_another_collective)
    assert "barrier of group 0" in found["text"]
    assert "push_pull of 'w', round 0" in found["text"]
    assert "in_another_collective" in found["stacks"]["rank 1"]


def in_another_order(bps: Any) -> float:
    first, second = ("b", "a") if bps.rank() == CULPRIT else ("a", "b")
    return add(bps, first) + add(bps, second)


def test_ranks_that_call_in_different_orders() -> None:
    found = answer_about_order(in_another_order, servers=2)
    assert "push_pull of 'a', round 0" in found["text"]
    assert "push_pull of 'b', round 0" in found["text"]
    assert "its deadline" not in found["text"]


def without_a_name(bps: Any) -> float:
    """Calls without a name are matched by element type and size: those of another size never meet."""
    return float(bps.push_pull(np.ones(7 if bps.rank() == CULPRIT else 5, np.float32))[0])


def test_another_size_without_a_name() -> None:
    found = answer_about_order(without_a_name)
    assert re.search(r"\b5\b", found["text"]), found["text"]
    assert re.search(r"\b7\b", found["text"]), found["text"]
    assert "without_a_name" in found["stacks"]["rank 1"]


def sums_after(bps: Any) -> str:
    add(bps, "w")
    mark("ready")
    await_mark("stopped")
    add(bps, "w")
    return "done"


def stopped(member: str, workers: int, servers: int | None) -> dict[str, Any]:
    with harness.start(sums_after, workers=workers, servers=servers) as job:
        job.await_marks("ready")
        job.kill(member, signal.SIGSTOP)
        job.set_mark("stopped")
        found = answer(job, lambda state: state is not None and bool(waits_of(state)))
        pid = job.pid(member)
        job.kill(member, signal.SIGCONT)
        assert job.results() == ["done"] * workers
        assert f"kill -CONT {pid}" in found["text"]
        return found


@pytest.mark.parametrize(
    ("member", "servers"),
    [
        pytest.param("rank 1", None, marks=pytest.mark.long),
        ("rank 1", 1),
        ("server 0", 1),
        pytest.param("rank 0", None, marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_stopped(member: str, servers: int | None) -> None:
    """Of rank 0, which hosts the scheduler without dedicated servers, the others know enough."""
    found = stopped(member, 2, servers)
    assert found["kind"] == "process"
    (culprit,) = found["culprits"]
    kind, index = member.split()
    assert culprit["rank" if kind == "rank" else "server_rank"] == int(index)


def sums_across(bps: Any, namespaces: list[str]) -> str:
    """Until the network is cut."""
    enter(namespaces[int(os.environ["RANK"])])
    bps.init()
    add(bps, "w")
    mark("ready")
    await_mark("stopped")
    handle = bps.push_pull_async(np.ones(1 << 20, np.float32), name="large")
    mark("sends")
    bps.synchronize(handle)
    bps.barrier()
    bps.shutdown()
    return "done"


@pytest.mark.long  # on a busy machine the job ends before the command has asked: it knows itself after four seconds
def test_a_network_that_is_cut(networks: network.Network) -> None:
    """Between two hosts, in one direction, and not to the scheduler: rank 1 has sent its part, and it is lost."""
    namespaces = [networks.namespace(member) for member in network.PAIR]
    address = networks.address("rank 0", "control")
    env = {"BPS_TRANSPORT": "tcp", "BPS_INTERFACE": "data", "MASTER_ADDR": address, "LOCAL_WORLD_SIZE": "1"}
    with harness.start(sums_across, namespaces, workers=2, env=env, init=False) as job:
        job.await_marks("ready")
        networks.cut("rank 1", "data", "out")
        job.set_mark("stopped")
        job.await_marks("sends")
        # Less than five seconds later the job itself knows, and ends.
        found = answer(job, lambda _: True, inside=networks.inside("rank 0"), settles=0.3)
        assert found["kind"] == "network", found["text"]
        assert 1 in ranks_of(found)
        assert "has not arrived" in found["text"]
        networks.mend("data")
        assert job.results() == ["done", "done"]


def meets(bps: Any) -> bool:
    add(bps, "w")
    mark("ready")
    await_mark("stopped")
    bps.barrier()
    return True


def test_the_scheduler_is_stopped() -> None:
    with harness.start(meets, workers=2, servers=1) as job:
        job.await_marks("ready")
        job.kill("scheduler", signal.SIGSTOP)
        job.set_mark("stopped")
        found = answer(job, ranks_that_wait(0, 1))
        assert found["kind"] == "scheduler"
        assert found["operation"] == "the barrier of group 0"
        assert not found["culprits"]
        job.kill("scheduler", signal.SIGCONT)
        assert job.results() == [True, True]


def has_lost_it(member: Member) -> bool:
    return bool((member.report or {"job": {}})["job"].get("why_scheduler_lost"))


def test_the_scheduler_is_gone() -> None:
    env = {"BPS_MIN_WORKERS": "2", "BPS_HEARTBEAT_TIMEOUT": "20"}
    with harness.start(in_python, workers=2, servers=1, env=env) as job:
        await_hang(job)
        job.kill("scheduler")
        state = job.eventually(
            lambda: state_of(job), 30, "the loss of the scheduler",
            until=lambda state: state is not None and any(map(has_lost_it, state.members.values())),
        )  # fmt: skip
        assert state is not None
        assert state.scheduler is None
        await_hang(job)
        found = answer(job, ranks_that_wait(0))
        assert (found["kind"], ranks_of(found)) == ("rank", [CULPRIT])  # the sums do not need a scheduler
        assert "this_is_where_it_hangs" in found["stacks"]["rank 1"]
        job.set_mark("go on")
        job.outcomes()


def test_a_job_that_has_not_begun() -> None:
    with harness.start(in_python, workers=2, servers=1, env={"DMLC_NUM_SERVER": "2"}) as job:
        found = job.eventually(
            lambda: explained(unjoined(job)), 30, "the diagnosis", until=lambda found: "server" in found.text
        )
        assert found.kind == "starting"
        assert "1 of 2 servers" in found.text
        for rank in range(2):
            job.kill(f"rank {rank}")
        job.outcomes()


def unjoined(job: harness.Job) -> JobState | None:
    pids = {job.pid("rank 0"), job.pid("rank 1")}
    for state in gather():
        if pids & {report["pid"] for report in state.unplaced}:
            return state
    return None


def behind_a_kernel(bps: Any) -> float:
    """The kernel of one rank ends late."""
    array = gpu_arrays.of(np.ones(5000, np.float32), stream=gpu_arrays.fake().fake_stream())
    kernels = [gpu_arrays.Kernel(array, 0)] if bps.rank() == CULPRIT else []
    handle = bps.push_pull_async_inplace(array, average=False, name="w")
    await_mark("go on")
    for kernel in kernels:
        kernel.let_go()
    bps.synchronize(handle)
    return float(array.read()[0])


@pytest.mark.parametrize("servers", [None, 1])
def test_a_rank_whose_gpu_is_late(servers: int | None) -> None:
    with harness.start(behind_a_kernel, workers=WORKERS, servers=servers, env=gpu_arrays.env()) as job:
        found = answer(job, ranks_that_wait(*range(WORKERS)))
        assert (found["kind"], ranks_of(found)) == ("gpu", [CULPRIT]), found["text"]
        assert "waits for its GPU: kernels before the operation have not ended" in found["text"]
        assert found["operation"] == "push_pull of 'w', round 0"
        assert "for room" not in found["text"]
        assert "behind_a_kernel" in found["stacks"]["rank 1"]
        assert end_all(job) == [WORKERS - 1] * WORKERS


# ---- The commands


def command(*words: str, env: dict[str, str] | None = None) -> str:
    variables = {**os.environ, **(env or {})}
    done = harness.run_command([*COMMAND, *words], env=variables)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.long
def test_the_scheduler_of_a_job_elsewhere_is_asked_by_its_address(tmp_path: Path) -> None:
    with harness.start(in_python, workers=WORKERS, servers=1) as job:
        await_hang(job)
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
    with harness.start(in_python, workers=2, servers=1) as job:
        await_hang(job)
        program = [*COMMAND, "why", f"127.0.0.1:{job.port}"]
        env = {**os.environ, "BPS_JOB_ID": job.name, "BPS_SECRET": "another one"}
        done = harness.run_command(program, env=env)
        assert done.returncode == 1
        assert "secret" in done.stderr
        assert "push_pull" not in done.stdout
        end_all(job)


def test_only_this_user_may_ask() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with harness.start(in_python, workers=2, servers=1) as job:
        await_hang(job)
        (process,) = (one for one in local.find() if one.pid == job.pid("rank 0"))
        ask = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
            "s.connect(bytes.fromhex(sys.argv[1])); s.sendall(b'report\\n'); sys.stdout.write(repr(s.recv(100)))"
        )
        done = harness.run_command([sys.executable, "-c", ask, process.addresses[0].hex()], within=120)
        assert done.stdout in ("b''", ""), done.stdout
        assert local.ask(process, "report", 5 * harness.PATIENCE) is not None
        end_all(job)


def fails(bps: Any) -> str:
    if bps.rank() == CULPRIT:
        mark("ready")
        await_mark("go on")
        return "late"
    await_mark("stopped")
    with pytest.raises(bps.DeadlineError) as error:
        bps.push_pull(np.ones(9, np.float32), name="w", timeout=0.5)
    await_mark("go on")  # the server forgets the round when a rank has left
    return str(error.value)


def complete(folder: Path) -> dict[int, Path]:
    """By process: the files that are there as a whole."""
    files = {int(file.stem.rpartition("-")[2]): file for file in folder.glob("*.json")}
    return {pid: file for pid, file in files.items() if file.read_text().endswith("\n")}


def test_a_rank_whose_operation_fails_leaves_a_file(tmp_path: Path) -> None:
    with harness.start(fails, workers=2, servers=1, env={"BPS_DUMP_DIR": str(tmp_path)}) as job:
        pids = [job.pid("rank 0"), job.pid("server 0")]
        job.await_marks("ready", [CULPRIT])
        job.kill(f"rank {CULPRIT}", signal.SIGSTOP)  # the server keeps the round until this rank has heard of its end
        job.set_mark("stopped")
        files = job.eventually(
            lambda: complete(tmp_path), 30, "a file of rank 0 and one of the server",
            until=lambda files: files.keys() >= set(pids),
        )  # fmt: skip
        report, of_server = (json.loads(files[pid].read_text()) for pid in pids)  # before the end brings others
        job.kill(f"rank {CULPRIT}", signal.SIGCONT)
        end_all(job)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files.values())
    assert of_server["last_failed_round"].startswith("round 0 of tensor ")
    (failed,) = of_server["rounds"]
    assert (failed["waits_for"], failed["missing"]) == ("members", [1])
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
        done = harness.run_command([*COMMAND, *words])
        assert done.returncode == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr

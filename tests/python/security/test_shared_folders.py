# SPDX-License-Identifier: Apache-2.0
"""What another user puts into a folder, or takes as a name, before a process of a job uses it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from reference.trace_format import check

from bps_rdma.tools.inspection import local

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
PRECIOUS = "a file of this user\n"


def put_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def put_fifo(path: Path, victim: Path) -> None:
    del victim
    os.mkfifo(path, 0o666)


def put_file(path: Path, victim: Path) -> None:
    """Of another user, where the test can be one."""
    del victim
    path.write_text("written before\n")
    path.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)


PUT = [put_link, put_fifo, put_file]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that nothing may change."""
    file = tmp_path / "precious"
    file.write_text(PRECIOUS)
    return file


def sums(bps: Any) -> float:
    return float(bps.push_pull(np.ones(10, np.float32), average=False, name="x")[0])


# ---- Traces


@pytest.mark.parametrize("put", PUT)
def test_a_trace_is_written_beside_what_was_put_there(put: Callable[..., None], tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "trace" / "worker-0"
    folder.mkdir(parents=True)
    names = ("comm.json", "comm.json.part", "comm.events")
    for name in names:
        put(folder / name, victim)
    before = [path.lstat() for path in sorted(folder.iterdir())]
    assert len(before) == len(names)
    assert harness.run(sums, workers=1, env={"BPS_TRACE": str(tmp_path / "trace")}) == [1]
    assert victim.read_text() == PRECIOUS
    trace = folder / "comm.json"
    assert trace.is_file()
    assert not trace.is_symlink()
    assert trace.stat().st_uid == os.geteuid()
    assert len(check(trace.read_text())["traceEvents"]) > 1


def untraced(tmp_path: Path) -> str:
    """What the log says of a job whose trace cannot be written."""
    with harness.start(sums, workers=1, env={"BPS_TRACE": str(tmp_path / "trace")}) as job:
        assert job.results() == [1]
        log = job.log("rank 0")
    assert "nothing is traced: " in log, log
    return log


def test_a_link_in_the_place_of_the_folder_of_a_trace_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "comm.json").write_text(PRECIOUS)
    (tmp_path / "trace" / "worker-0").symlink_to(other)
    assert "worker-0 is not a folder" in untraced(tmp_path)
    assert [path.name for path in other.iterdir()] == ["comm.json"]
    assert (other / "comm.json").read_text() == PRECIOUS


@as_root
def test_a_folder_of_another_user_takes_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "trace" / "worker-0"
    folder.mkdir(parents=True)
    os.chown(folder, NOBODY, NOBODY)
    assert f"worker-0 belongs to user {NOBODY}" in untraced(tmp_path)
    assert not list(folder.iterdir())


def test_a_fifo_among_traces_or_reports_holds_nobody_up(tmp_path: Path) -> None:
    folder = tmp_path / "trace" / "worker-0"
    folder.mkdir(parents=True)
    for command, where, name in (
        ("trace summary", tmp_path / "trace", "comm.json"),
        ("trace summary", tmp_path / "trace", "comm.events"),
        ("why", folder, "comm.json"),
    ):
        os.mkfifo(folder / name)
        done = bps_command(*command.split(), str(where))
        assert done.returncode != 0
        assert f"{folder / name} is not a regular file" in done.stderr, done.stderr
        (folder / name).unlink()


def bps_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Like a program of the user."""
    return harness.run_command([sys.executable, "-P", "-m", "bps_rdma", *words], env=harness.clean_env(), within=60)


# ---- What a command writes


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job with one rank."""
    folder = tmp_path_factory.mktemp("traces")
    harness.run(sums, workers=1, env={"BPS_TRACE": str(folder)})
    return folder


@as_root
@pytest.mark.parametrize("put", PUT)
def test_a_command_does_not_write_into_what_another_user_has_put_there(
    put: Callable[..., None], traces: Path, tmp_path: Path, victim: Path
) -> None:
    out = tmp_path / "out.json"
    put(out, victim)
    os.chown(out, NOBODY, NOBODY, follow_symlinks=False)
    done = bps_command("trace", "merge", str(traces), "--out", str(out))
    assert done.returncode != 0
    assert f"out.json belongs to user {NOBODY}" in done.stderr, done.stderr
    assert victim.read_text() == PRECIOUS


def test_a_command_writes_where_the_user_wants_it(traces: Path, tmp_path: Path, victim: Path) -> None:
    """Also through links of this user's, or to the terminal."""
    new, old, linked = tmp_path / "new.json", tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("x" * 1_000_000)
    linked.symlink_to(victim)
    for out in (new, old, linked):
        assert bps_command("trace", "merge", str(traces), "--out", str(out)).returncode == 0
        check(out.read_text())
    assert linked.is_symlink()
    done = bps_command("trace", "merge", str(traces), "--out", "/dev/stdout")
    assert done.returncode == 0
    assert done.stdout.startswith("{")


# ---- Reports of a failure


def fails(bps: Any, put: Callable[..., None], folder: str, victim: str) -> str:
    """Rank 1 comes too late; what rank 0 will write has a name that others can know."""
    if bps.rank() == 1:
        harness.await_mark("failed", 0)
        return ""
    name = f"bps-{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}-{os.getpid()}.json"
    put(Path(folder, name), Path(victim))
    with pytest.raises(bps.DeadlineError):
        bps.push_pull(np.ones(9, np.float32), name="w", timeout=1)
    harness.mark("failed")
    return name


@pytest.mark.parametrize("put", PUT)
def test_a_report_is_written_beside_what_was_put_there(put: Callable[..., None], tmp_path: Path, victim: Path) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    env = {"BPS_DUMP_DIR": str(folder)}
    name = harness.run(fails, put, str(folder), str(victim), workers=2, servers=1, env=env)[0]
    assert victim.read_text() == PRECIOUS
    report = folder / name
    found = report.lstat()
    assert (found.st_mode, found.st_uid) == (0o100600, os.geteuid())
    assert json.loads(report.read_text())["rank"] == 0
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


# ---- The state of the scheduler


def scheduler(state: Path) -> subprocess.CompletedProcess[str]:
    """What bps-scheduler says of this file."""
    env = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1",
           "BPS_MIN_WORKERS": "1", "BPS_SCHEDULER_STATE": str(state), "BPS_SECRET": "0123456789abcdef"}  # fmt: skip
    return harness.run_command([harness.binary("bps-scheduler")], env=harness.clean_env(**env), within=30)


def valid(path: Path, mode: int = 0o600) -> Path:
    path.write_text("bps-scheduler: run 123\n")
    path.chmod(mode)
    return path


def by_link(path: Path) -> None:
    path.symlink_to(valid(path.with_name("elsewhere")))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (by_link, "is a symbolic link"),
        (lambda path: os.mkfifo(path, 0o600), "is not a regular file"),
        (lambda path: valid(path, 0o606), "every user can write it"),
        (lambda path: valid(path, 0o666), "every user can write it"),
        (lambda path: path.parent.rmdir(), "cannot open the folder"),
        pytest.param(
            lambda path: os.chown(valid(path), NOBODY, NOBODY), f"belongs to user {NOBODY}", marks=as_root, id="owner"
        ),
    ],
)
def test_a_state_that_others_may_have_written_is_refused(
    make: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    state = tmp_path / "folder" / "state"
    state.parent.mkdir()
    make(state)
    done = scheduler(state)
    assert done.returncode == 1
    assert says in done.stderr, done.stderr
    assert "Bad file descriptor" not in done.stderr
    assert "BPS_SCHEDULER_STATE" in done.stderr


@pytest.mark.parametrize("owner", [pytest.param(None, id="this user"), pytest.param(0, id="root", marks=as_root)])
def test_a_state_whose_owner_or_root_lets_a_group_write_it_is_taken(owner: int | None, tmp_path: Path) -> None:
    """As Kubernetes changes what lies in a volume with an fsGroup, when the next pod starts."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o2775)
    state = valid(tmp_path / "volume" / "state", 0o660)
    if os.geteuid() == 0:
        os.chown(state, owner or 0, NOBODY)
    env = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "BPS_MIN_WORKERS": "1",
           "DMLC_PS_ROOT_PORT": str(harness.free_port()), "BPS_SCHEDULER_STATE": str(state)}  # fmt: skip
    with harness.Members(tmp_path) as members:
        members.command("scheduler", [harness.binary("bps-scheduler")], harness.clean_env(**env))
        members.eventually(lambda: "in the place of a scheduler that was lost" in members.log("scheduler"))
    assert state.stat().st_mode & 0o777 == 0o660


# ---- Names of local sockets

TAKES_NAMES = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
taken = []
for name in (word.replace("PID", str(os.getpid())) for word in sys.argv[1:]):
    taken.append(socket.socket(socket.AF_UNIX))
    taken[-1].bind("\\0" + name)
    taken[-1].listen(1)
    for _ in range(3):  # its queue is full
        taken.append(socket.socket(socket.AF_UNIX))
        taken[-1].setblocking(False)
        taken[-1].connect_ex("\\0" + name)
print("taken", flush=True)
sys.stdin.read()
"""


def starts_after_others(bps: Any) -> None:
    """Another user has names of the form that this process's has, older and newer ones."""
    space = Path("/proc/self/ns/pid").stat().st_ino
    names = [f"bps_rdma-{os.geteuid()}-{os.getpid()}-{space}-{number}-0a" for number in (0, 1, 2, 99)]
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_NAMES, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        bps.init()
        sums(bps)
        harness.mark("ready")
        harness.await_mark("end")
        bps.shutdown()
        other.communicate()


@as_root
def test_bps_why_finds_a_process_whose_names_another_user_has_taken() -> None:
    with harness.start(starts_after_others, workers=1, init=False) as job:
        job.await_marks("ready")
        done = bps_command("dump")
        pid = job.pid("rank 0")
        job.set_mark("end")
        job.results()
        log = job.log("rank 0")
    assert done.returncode == 0, done.stderr + log
    reports = [report for found in json.loads(done.stdout) for report in found["members"]]  # also of other jobs
    assert [report["rank"] for report in reports if report["pid"] == pid] == [0]
    assert "will show nothing" not in log


@as_root
def test_names_of_another_user_are_no_processes_of_a_job() -> None:
    space = Path("/proc/self/ns/pid").stat().st_ino
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_NAMES, f"bps_rdma-{os.geteuid()}-PID-{space}-3-0a"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        found = [process.pid for process in local.find()]
        other.communicate()
    assert other.pid not in found

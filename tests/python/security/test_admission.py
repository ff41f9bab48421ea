# SPDX-License-Identifier: Apache-2.0
"""Who is let in: the secret of a job and where it comes from; other users, earlier runs, false claims, floods."""

import collections
import functools
import multiprocessing
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark
from reference import handshake
from reference.handshake import CONTROL, DATA, Credentials, RefusedError, shake_hands
from reference.wire import connect, is_closed, listening_port, local_names

NOBODY = 65534
NO_SECRET = {"BPS_SECRET": "", "BPS_JOB_ID": ""}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def become_another_user() -> None:
    """With a folder for a secret of its own, which the test removes."""
    folder = tempfile.mkdtemp(prefix="stranger-", dir=os.environ["BPS_TEST_FOLDER"])
    os.chown(folder, NOBODY, NOBODY)
    Path(os.environ["BPS_TEST_FOLDER"]).chmod(0o777)  # for its log and result
    os.environ["XDG_RUNTIME_DIR"] = folder
    user = os.getuid()
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.getuid = lambda: user  # type: ignore[method-assign, unused-ignore]  # what is derived from it, it can derive too


# ---- The secret of this user on this host


def joins_or_is_refused(bps: Any) -> str:
    role = os.environ["ROLE"]
    if role == "stranger":
        become_another_user()
    elif role == "late":  # a job that lets the stranger in is complete without this one
        await_mark("go")
    try:
        bps.init()
    except bps.BpsError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if role == "stranger":
            Path(os.environ["BPS_TEST_FOLDER"], "tried").touch()
    total = bps.push_pull(np.ones(10, np.float32), average=False, name="x")
    bps.shutdown()
    return f"joined: {total[0]}"


@as_root
@pytest.mark.parametrize("launcher", ["BytePS", "torchrun"])
def test_another_user_who_knows_host_and_port_cannot_join(launcher, tmp_path):
    """Rank 2 of the test takes part as rank 0 of the job, before the real one comes."""
    env = NO_SECRET | {"XDG_RUNTIME_DIR": str(tmp_path), "BPS_JOIN_TIMEOUT": "60"}
    roles: list[dict[str, str]]
    if launcher == "BytePS":
        env |= {"DMLC_NUM_WORKER": "2"}
        roles = [
            {"ROLE": "late"},
            {"ROLE": "member"},
            {"ROLE": "stranger", "DMLC_WORKER_ID": "0", "BPS_JOIN_TIMEOUT": "3"},
        ]
    else:  # rank 1 finds the scheduler of the stranger first
        env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        stranger = {"RANK": "1", "LOCAL_RANK": "1", "BPS_JOIN_TIMEOUT": "3"}
        roles = [{"ROLE": "member"}, {"ROLE": "late"}, {"ROLE": "stranger"} | stranger]
    options: dict[str, Any] = {"servers": 1} if launcher == "BytePS" else {}
    with harness.start(joins_or_is_refused, workers=3, env=env, rank_env=roles, init=False, **options) as job:
        harness.eventually((job.folder / "tried").exists)
        job.set_mark("go")
        told = [outcome.value for outcome in job.outcomes()]
    assert told[:2] == ["joined: 2.0", "joined: 2.0"], told
    assert told[2].startswith(("AuthenticationError", "UnreachableError")), told


def sums(bps: Any) -> float:
    return float(bps.push_pull(np.ones(10, np.float32), average=False, name="x")[0])


@pytest.mark.parametrize("servers", [None, 1])
def test_processes_of_one_user_need_no_secret(servers, tmp_path):
    env = NO_SECRET | {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert harness.run(sums, workers=2, servers=servers, env=env) == [2, 2]
    secret = tmp_path / "bps_rdma" / "secret"
    assert secret.parent.stat().st_mode & 0o777 == 0o700
    assert secret.stat().st_mode & 0o777 == 0o600
    first = secret.read_text()
    assert len(first.strip()) == 64
    assert harness.run(sums, workers=2, servers=servers, env=env) == [2, 2]
    assert secret.read_text() == first, "a secret is made once"
    assert list(secret.parent.iterdir()) == [secret]


class InitError:
    """What init() raises with these settings; a class, so that it can be sent to a rank."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def __call__(self, bps: Any) -> str:
        threads = len(list(Path("/proc/self/task").iterdir()))
        try:
            bps.init(**self.settings)
        except bps.BpsError as error:
            assert len(list(Path("/proc/self/task").iterdir())) == threads, "something was started"
            return f"{type(error).__name__}: {error}"
        bps.shutdown()
        return "joined"


def init_alone(settings: dict[str, Any], env: dict[str, str] | None = None) -> str:
    """What init() says as rank 1 of 2."""
    variables = NO_SECRET | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "", "BPS_JOIN_TIMEOUT": "0.3"}
    (told,) = harness.run(InitError(settings), workers=1, env=variables | (env or {}), init=False)
    assert isinstance(told, str)
    return told


def test_several_hosts_without_a_secret_are_refused():
    told = init_alone({"root_uri": "192.0.2.1", "root_port": 9000})
    assert told.startswith("InvalidArgumentError"), told
    for part in ("192.0.2.1", "no secret", "openssl rand -hex 32", "chmod 600", "BPS_SECRET_FILE", "BPS_INSECURE=1"):
        assert part in told, told
    told = init_alone({}, {"MASTER_ADDR": socket.gethostname(), "LOCAL_WORLD_SIZE": "1"})
    assert "no secret" in told, "torchrun has started half of the ranks elsewhere"
    told = init_alone({"root_uri": "192.0.2.1", "root_port": 9000, "insecure": True})
    assert told.startswith("UnreachableError"), told


@pytest.mark.parametrize("role", ["bps-server", "bps-scheduler"])
def test_the_binaries_refuse_several_hosts_without_a_secret(role):
    env = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "192.0.2.1", "DMLC_PS_ROOT_PORT": "9000"}
    done = harness.run_command([harness.binary(role)], env=harness.clean_env(**env), within=30)
    assert done.returncode == 1
    assert "no secret" in done.stderr
    assert "openssl rand" in done.stderr


def insecure_sum(bps: Any) -> tuple[float, bool]:
    return sums(bps), bps.job.current().process.is_authenticated


def test_an_insecure_job_is_warned_of_once():
    with harness.start(insecure_sum, workers=2, env=NO_SECRET | {"BPS_INSECURE": "1"}) as job:
        outcomes = job.outcomes()
    assert [outcome.value for outcome in outcomes] == [(2, False), (2, False)]
    assert [outcome.output.count("BPS_INSECURE=1: this job has no secret") for outcome in outcomes] == [1, 0]


# ---- Files with a secret


def write_secret(path: Path, text: str = "0123456789abcdef" * 4, mode: int = 0o600) -> Path:
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_a_secret_comes_from_a_file(tmp_path):
    env = {"BPS_SECRET": "", "BPS_SECRET_FILE": str(write_secret(tmp_path / "s"))}
    assert harness.run(sums, workers=2, env=env) == [2, 2]
    other = {"BPS_SECRET": "", "BPS_SECRET_FILE": str(write_secret(tmp_path / "t", "another secret of the job"))}
    with harness.start(joins_late, workers=2, env=env | {"BPS_JOIN_TIMEOUT": "5"}, rank_env=[{}, other],
                       init=False) as job:  # fmt: skip
        told = [outcome.value for outcome in job.outcomes()]
    assert "AuthenticationError" in told[1], told


def joins_late(bps: Any) -> str:
    try:
        bps.init()
    except bps.BpsError as error:
        return f"{type(error).__name__}: {error}"
    bps.shutdown()
    return "joined"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: write_secret(path, mode=0o640), "chmod 600"),
        (lambda path: write_secret(path, mode=0o604), "its mode is 0604"),
        (lambda path: write_secret(path, "short"), "too short"),
        (lambda path: path, "No such file"),
        (lambda path: path.mkdir() or path, "not a regular file"),
        (lambda path: os.mkfifo(path, 0o600) or path, "not a regular file"),
    ],
)
def test_a_file_that_is_not_safe_is_refused(make, says, tmp_path):
    told = init_alone({"secret_file": str(make(tmp_path / "secret"))})
    assert told.startswith("InvalidArgumentError"), told
    assert says in told
    assert "hint" in told


@as_root
def test_a_file_of_another_user_is_refused(tmp_path):
    path = write_secret(tmp_path / "secret")
    os.chown(path, NOBODY, NOBODY)
    assert f"belongs to user {NOBODY}" in init_alone({"secret_file": str(path)})


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_a_host_secret_that_others_can_reach_is_refused(what, tmp_path):
    folder = tmp_path / "bps_rdma"
    folder.mkdir(mode=0o700)
    if what == "folder":
        folder.chmod(0o755)
    elif what == "file":
        write_secret(folder / "secret", mode=0o644)
    else:
        (folder / "secret").symlink_to(write_secret(tmp_path / "elsewhere"))
    told = init_alone({}, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert told.startswith("InvalidArgumentError"), told
    assert {"folder": "chmod 700", "file": "chmod 600", "link": "symbolic link"}[what] in told


def test_a_secret_is_nowhere_to_be_read(tmp_path):
    """Not in bps config, in a log, or in a command line."""
    secret = "5ecre7" * 6
    env = {"BPS_SECRET": secret, "BPS_LOG_LEVEL": "DEBUG"}
    with harness.start(works_until_told, workers=2, servers=1, env=env) as job:
        job.await_marks("ready")
        members = ["rank 0", "rank 1", "server 0", "scheduler"]
        lines = [Path(f"/proc/{job.pid(member)}/cmdline").read_bytes() for member in members]
        job.set_mark("end")
        job.results()
        logs = [job.log(member) for member in members]
    assert not any(secret.encode() in line for line in lines)
    assert not any(secret in log for log in logs)


# ---- Members, and those who are not, at the ports of a job


def works_until_told(bps: Any) -> bool:
    right = True
    mark("ready")
    rounds = 0
    while rounds % 10 != 9 or not stops(bps):
        found = bps.push_pull(np.full(50_000, rounds, np.float32), average=False, name="x")
        right &= bool((found == bps.size() * rounds).all())
        rounds += 1
    return right


def stops(bps: Any) -> bool:
    """Whether the test has told rank 0 to stop; the same on all ranks."""
    told = harness.is_marked("end") and bps.rank() == 0
    return bool(bps.push_pull(np.full(1, float(told)), average=False, name="stop")[0])


def test_what_a_member_claims_is_checked():
    """A process with the secret that is no worker of this job, names loops that do not exist, or is of another run."""
    with harness.start(works_until_told, workers=2, servers=1, env={"BPS_TRANSPORT": "tcp"}) as job:
        job.await_marks("ready")
        base = Credentials.of(job.name, job.name)
        view = shake_hands(connect(job.port), base).view
        port = listening_port(job.pid("server 0"))
        now = base.within(view)
        incarnation, epoch = struct.unpack("<QI", view)
        assert incarnation != 0
        assert epoch == 1
        earlier = base.within(struct.pack("<QI", incarnation ^ 1, epoch))
        next_epoch = base.within(struct.pack("<QI", incarnation, epoch + 1))
        forged = Credentials(now.job, Credentials.of(job.name, "guessed").key)
        for stranger, reason in ((earlier, 2), (next_epoch, 2), (base, 2), (forged, None)):
            with pytest.raises(RefusedError) as raised:
                shake_hands(connect(port), stranger, CONTROL, node=1)
            assert raised.value.reason in (reason, handshake.REFUSED_SECRET)
        for claim in ({"node": 3}, {"node": 77}, {"node": 1, "client_loop": 2}, {"node": 1, "client_loop": 65535},
                      {"node": 1, "server_loop": 64}, {"node": 1, "server_loop": 65535}, {"node": 1}):  # fmt: skip
            session = shake_hands(connect(port), now, CONTROL, **claim)
            assert is_closed(session.socket), claim
        assert is_closed(shake_hands(connect(port), now, DATA, node=2, client_loop=7).socket)
        job.set_mark("end")
        assert job.results() == [True, True]
        log = job.log("server 0")
    assert log.count("is not a worker of this job") == 2, log
    assert log.count("it names worker loop") == 3, log
    assert log.count("it names server loop") == 2, log
    assert log.count("whose connections are complete") == 1, log


def call_as_another_user(name: str, answer: Any) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        answer.send(is_closed(connection, timeout=10))


@as_root
def test_local_sockets_are_closed_to_other_users_before_they_say_anything():
    with harness.start(works_until_told, workers=2, servers=1) as job:
        job.await_marks("ready")
        name = local_names(job.pid("server 0"))[0]
        before = socket.socket(socket.AF_UNIX)
        here, there = multiprocessing.get_context("fork").Pipe()
        for _ in range(5):  # the first one may wait for two seconds, if this process is slow
            before = socket.socket(socket.AF_UNIX)
            before.connect(name)
            stranger = multiprocessing.get_context("fork").Process(target=call_as_another_user, args=(name, there))
            stranger.start()
            assert here.recv(), "another user may keep a connection"
            stranger.join()
            if not select.select([before], [], [], 0)[0]:
                break  # its own user's connection is older and still open
        else:
            pytest.fail("a silent connection of the same user was closed as early as the stranger's")
        before.close()
        job.set_mark("end")
        assert job.results() == [True, True]


# ---- Floods


def silent_connections(port: int) -> None:
    """Opens connections that say nothing, as fast as it can, and keeps the last few hundred."""
    kept: collections.deque[socket.socket] = collections.deque()
    while True:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        kept.append(connection)
        if len(kept) > 300:
            kept.popleft().close()


def short_connections(port: int) -> None:
    """Connects and resets, so that no port stays taken for a minute."""
    while True:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.connect_ex(("127.0.0.1", port))
        connection.close()


def flood(port: int, how: Callable[[int], None]) -> Any:
    """Three processes that do nothing else."""
    return harness.beside(*[functools.partial(how, port)] * 3)


@pytest.mark.long
@pytest.mark.parametrize("at", ["scheduler", "server 0"])
@pytest.mark.parametrize("how", [silent_connections, short_connections])
def test_a_flood_of_connections_ends_nothing(how, at):
    """With the default patience for silence."""
    env = {"BPS_TRANSPORT": "tcp", "BPS_HEARTBEAT_TIMEOUT": "1.5"}
    with harness.start(works_until_told, workers=2, servers=1, env=env) as job:
        job.await_marks("ready")
        with flood(job.port if at == "scheduler" else listening_port(job.pid(at)), how):
            time.sleep(8)  # several times that patience
        job.set_mark("end")
        assert job.results() == [True, True]


def joins_when_told(bps: Any) -> float:
    await_mark("flood")
    bps.init()
    total = sums(bps)
    bps.shutdown()
    return total


def test_members_join_during_a_flood():
    with (
        harness.start(joins_when_told, workers=2, servers=1, env={"BPS_TRANSPORT": "tcp"}, init=False) as job,
        flood(job.port, silent_connections),
    ):
        job.set_mark("flood")
        assert job.results() == [2, 2]

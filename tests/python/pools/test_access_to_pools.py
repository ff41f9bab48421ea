# SPDX-License-Identifier: Apache-2.0
"""Who may ask a pool: users with their keys. Strangers, other users, floods and other versions."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import struct
import threading
from pathlib import Path

import harness
import pytest
from pool_daemon import KEYS, Daemon, await_no_server, write_private
from reference.handshake import HELLO, MAGIC, REFUSAL, VERSION, Credentials, RefusedError, shake_hands
from reference.wire import Messages, connect, is_closed

from bps_rdma import _core
from bps_rdma.errors import AuthenticationError, BpsError, InvalidArgumentError, UnreachableError, VersionError

NOBODY = 65534
OF_A_JOB = {"BPS_NUM_WORKERS": "1", "BPS_NUM_SERVERS": "1", "BPS_ROOT_PORT": "1"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def credentials(user: str, key: str) -> Credentials:
    return Credentials.of(f"bps pool, user {user}", key)


def client(pool: Daemon, user: str = "alice", key: str = "", timeout: float = 20) -> _core.PoolClient:
    return _core.PoolClient("127.0.0.1", pool.port, user, key or KEYS[user], timeout)


@pytest.mark.parametrize(("user", "key"), [("alice", "wrong" * 10), ("mallory", KEYS["alice"]), ("bob", KEYS["alice"])])
def test_a_wrong_key_or_another_name_is_refused(pool, user, key):
    with pytest.raises(AuthenticationError, match=f"does not know the user {user} with this key"):
        client(pool, user, key)
    # Who is known and who is not cannot be told apart.
    with connect(pool.port) as one, pytest.raises(RefusedError) as refused:
        shake_hands(one, credentials(user, key))
    assert refused.value.reason == 2 + 1


def test_a_job_with_a_wrong_key_goes_on_without_the_pool(pool, make_job):
    write_private(pool.folder / "wrong", f"alice {KEYS['bob']}\n")
    job = make_job(pool, "alice", BPS_POOL_KEY_FILE=str(pool.folder / "wrong"), BPS_PLACEMENT="auto")
    job.await_steps()
    assert "goes on without servers of pools" in job.finish()
    assert not pool.servers()


@pytest.mark.long
def test_a_key_file_that_others_can_read_is_refused(pool, make_job):
    (pool.folder / "key-of-alice").chmod(0o644)
    job = make_job(pool, "alice", BPS_PLACEMENT="auto")
    assert "can be used by other users: its mode is 0644" in job.finish()


def test_one_user_neither_sees_nor_ends_a_job_of_another(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    (name,) = [one["job"] for one in pool.shown_to("alice")["jobs"]]
    assert pool.shown_to("bob")["jobs"] == []
    done = harness.run_command([harness.binary("bps"), "pool", "--end", name, "--json"], env=pool.as_user("bob"))
    assert (done.returncode, f"user bob has no job {name} here" in done.stdout) == (1, True)
    bobs = client(pool, "bob")
    lease, _, _ = client(pool, "alice").reserve("another", 1, 0, OF_A_JOB)
    with pytest.raises(BpsError, match="nothing is reserved for this job any more"):
        bobs.begin(lease, {}, "secret")
    job.await_steps()
    assert len(pool.servers()) == 1
    client(pool, "operator").end(name)
    await_no_server(pool, 10)


@as_root
def test_another_user_of_the_machine_reaches_nothing(pool, make_job):
    job = make_job(pool, "alice")
    job.await_steps()
    (server,) = pool.servers()
    seen = multiprocessing.get_context("fork").Queue()  # type: ignore[var-annotated]
    stranger = multiprocessing.get_context("fork").Process(target=_tries, args=(pool, server, seen))
    stranger.start()
    tried = seen.get(timeout=60 * harness.PATIENCE)
    stranger.join()
    assert tried == ["InvalidArgumentError", *["PermissionError"] * 4, "AuthenticationError"]
    job.finish()


def _tries(pool: Daemon, server: int, seen: multiprocessing.Queue[list[str]]) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    tried = []
    for attempt in (
        lambda: _core.read_pool_key(str(pool.folder / "key-of-alice"), "alice"),
        lambda: Path(f"/proc/{server}/environ").read_bytes(),
        lambda: Path(f"/proc/{server}/mem").read_bytes(),
        lambda: os.kill(server, signal.SIGKILL),
        lambda: os.kill(pool.command.pid, signal.SIGHUP),
        lambda: client(pool, "alice", "a guess of the key"),
    ):
        try:
            attempt()
            tried.append("reached")
        except Exception as error:  # whatever it is, it is compared
            tried.append(type(error).__name__)
    seen.put(tried)


# ---- Floods


def descriptors(pool: Daemon) -> int:
    return len(list(Path(f"/proc/{pool.command.pid}/fd").iterdir()))


def silent(port: int) -> None:
    held = []
    while True:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port)))
        if len(held) > 900:
            held.clear()


def garbage(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(os.urandom(100))


def test_a_flood_of_strangers_keeps_no_user_out_and_ends_no_job(pool, make_job):
    before = make_job(pool, "alice")
    before.await_steps()
    with harness.beside(*(functools.partial(how, pool.port) for how in (silent, garbage))):
        harness.eventually(lambda: descriptors(pool) > 100, what="a flood")
        during = make_job(pool, "bob")
        during.await_steps()
        before.await_steps()
        assert descriptors(pool) < 1024 + 100
        assert "has summed with 1 servers" in during.finish()
    assert "has summed with 1 servers" in before.finish()


def test_a_user_has_a_few_connections_at_a_time(pool):
    held = [client(pool) for _ in range(16)]
    assert all(one.list() for one in held)
    with pytest.raises(UnreachableError, match="it allows each user a few connections at a time"):
        client(pool).list()
    assert client(pool, "bob").list()
    del held[0]
    harness.eventually(lambda: _has_room(pool))


def _has_room(pool: Daemon) -> bool:
    try:
        return bool(client(pool).list())
    except UnreachableError:
        return False


def test_what_cannot_be_read_is_refused_and_what_is_forged_ends_the_connection(pool):
    with connect(pool.port) as one:
        session = shake_hands(one, credentials("alice", KEYS["alice"]))
        messages = Messages(session, True)
        one.sendall(messages.frame(b"\xff" * 20))
        assert b"the request cannot be read" in one.recv(4096)
        forged = bytearray(messages.frame(b"\x03"))
        forged[-1] ^= 1
        one.sendall(forged)
        assert is_closed(one)
    with connect(pool.port) as one:
        session = shake_hands(one, credentials("alice", KEYS["alice"]))
        one.sendall(struct.pack("<I", 1 << 30))
        assert is_closed(one)
    assert pool.shown_to("alice")["jobs_taken"] == 0


def test_settings_that_are_not_for_a_job_are_refused_by_the_pool(pool):
    """A client of ours does not send them."""
    with connect(pool.port) as one:
        messages = Messages(shake_hands(one, credentials("alice", KEYS["alice"])), True)
        settings = _texts(*(word for pair in OF_A_JOB.items() for word in pair))
        one.sendall(messages.frame(b"\x00" + _texts("job") + struct.pack("<IQI", 1, 0, len(OF_A_JOB)) + settings))
        reply = one.recv(4096)
        assert reply[4] == 1  # Reserved
        (lease,) = struct.unpack_from("<Q", reply, 5)
        pairs = _texts("LD_PRELOAD", "/tmp/evil.so")
        one.sendall(messages.frame(b"\x01" + struct.pack("<QI", lease, 1) + pairs + struct.pack("<I", 0)))
        assert b"LD_PRELOAD is not for a job of a pool to set" in one.recv(4096)
    assert not pool.servers()


def _texts(*words: str) -> bytes:
    return b"".join(struct.pack("<I", len(word)) + word.encode() for word in words)


def test_a_job_without_a_secret_of_its_own_is_refused(pool):
    """Its server would take that of the pool's user."""
    alice = client(pool)
    lease, _, _ = alice.reserve("job", 1, 0, OF_A_JOB)
    with pytest.raises(InvalidArgumentError, match="the secret of the job has 0 characters"):
        alice.begin(lease, OF_A_JOB, "")
    assert not pool.servers()


# ---- Versions


def test_a_pool_of_another_version_says_so(make_job, pool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            one, _ = listener.accept()
            with one:
                one.recv(4096)
                one.sendall(struct.pack("<IHBB", MAGIC, VERSION - 1, REFUSAL, 1))
                one.shutdown(socket.SHUT_WR)
                one.recv(4096)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(VersionError, match=f"speaks version {VERSION - 1} of the protocol"):
            _core.PoolClient("127.0.0.1", port, "alice", KEYS["alice"], 20)
        thread.join()


def test_a_user_of_another_version_is_told(pool):
    with connect(pool.port) as one:
        one.sendall(struct.pack("<IHBB", MAGIC, VERSION + 1, HELLO, 0) + bytes(44))
        assert struct.unpack("<IHBB", one.recv(8)) == (MAGIC, VERSION, REFUSAL, 1)


# ---- Keys


def test_keys_are_made_by_the_server_program(tmp_path):
    done = harness.run_command([harness.binary("bps-server"), "--pool-key", "alice"])
    path = tmp_path / "key"
    write_private(path, done.stdout)
    user, key = _core.read_pool_key(str(path), "whoever")
    assert (user, len(key)) == ("alice", 64)
    assert harness.run_command([harness.binary("bps-server"), "--pool-key", "a b"]).returncode == 1
    with pytest.raises(InvalidArgumentError):
        _core.read_pool_key(str(tmp_path / "none"), "alice")


def test_a_pool_without_keys_does_not_start():
    done = harness.run_command([harness.binary("bps-server"), "--pool"])
    assert (done.returncode, "BPS_POOL_KEY_FILE is not set" in done.stderr) == (1, True)
    pooled = harness.run_command([harness.binary("bps-server"), "--pooled"])
    assert (pooled.returncode, "--pooled is for a pool" in pooled.stderr) == (1, True)


def test_the_secret_of_a_job_does_not_travel_in_the_clear(pool, make_job):
    """Between the launcher and the pool there is somebody who listens."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_listen_in, args=(listener, pool.port, heard), daemon=True).start()
        port = listener.getsockname()[1]
        job = make_job(pool, "alice", "--pool", f"127.0.0.1:{port}")
        job.await_steps()
        secret = _secret_of(job.command.pid)
        job.finish()
    assert b"BPS_ROOT_PORT" in heard  # settings are not secret
    assert secret not in heard
    assert len(secret) == 64


def _listen_in(listener: socket.socket, port: int, heard: bytearray) -> None:
    one, _ = listener.accept()
    other = socket.create_connection(("127.0.0.1", port))

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                heard.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=copy, args=(other, one), daemon=True)
    back.start()
    copy(one, other)
    back.join()


def _secret_of(launcher: int) -> bytes:
    """That of a rank, in whose environment it is."""

    def found() -> bytes:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"BPS_SECRET="):
                    return variable.partition(b"=")[2]
        return b""

    return harness.eventually(found, 30, "a rank that has a secret")

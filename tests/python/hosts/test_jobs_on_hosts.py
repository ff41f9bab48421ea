# SPDX-License-Identifier: Apache-2.0
"""`bps run -H` with a real sshd on three hosts: what runs where, and what is checked before."""

import json
import signal
import sys
from pathlib import Path

import harness
import pytest
from ssh_hosts import Hosts, await_files, lines_of

import bps_rdma

SUM = """
import os, socket, sys
import numpy as np
import bps_rdma as bps
bps.init()
total = bps.push_pull(np.full(100_000, bps.rank() + 1, np.float32), average=False, name="x")
assert (total == sum(range(1, bps.size() + 1))).all()
names = os.environ.get("NAMES", "").split()
told = " ".join(f"{name}={os.environ.get(name, '-')}" for name in names)
here = f"{bps.local_rank()} of {bps.local_size()} on {socket.gethostname()}"
print(f"rank {bps.rank()} of {bps.size()}, {here} {told}".strip(), flush=True)
"""
STAY = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], f"up-{bps.rank()}").touch()
while not pathlib.Path(sys.argv[1], "over").exists():
    time.sleep(0.01)
"""
END = "bps.shutdown()\n"


def script(folder: Path, text: str = "") -> str:
    (folder / "job.py").write_text(SUM + text + END)
    return "job.py"


def test_ranks_on_two_hosts(hosts: Hosts, tmp_path: Path):
    env = {"NAMES": "SEEN ALSO UNSEEN BYTEPS_PARTITION_BYTES MASTER_ADDR", "ALSO": "of the caller", "UNSEEN": "secret",
           "BYTEPS_PARTITION_BYTES": "65536"}  # fmt: skip
    words = ["run", "-H", "host1:2,host2:1", "-x", "NAMES", "-x", "ALSO", "-x", "SEEN=a b", script(tmp_path)]
    status, said = hosts.ended(*words, cwd=tmp_path, env=env)
    root = hosts.network.address("host1", "control")
    told = f"SEEN=a b ALSO=of the caller UNSEEN=- BYTEPS_PARTITION_BYTES=65536 MASTER_ADDR={root}"
    assert lines_of(said, "rank") == [
        f"rank 0 of 3, 0 of 2 on host1 {told}",
        f"rank 1 of 3, 1 of 2 on host1 {told}",
        f"rank 2 of 3, 0 of 1 on host2 {told}",
    ]
    assert status == 0, said


def test_servers_of_a_host_of_their_own(hosts: Hosts, tmp_path: Path):
    (tmp_path / "list").write_text("host1 slots=1  # the first\nhost2\n")
    words = ["run", "--hostfile", "list", "--server-hosts", "host3:2", "--prefix", sys.executable, script(tmp_path)]
    status, said = hosts.ended(*words, cwd=tmp_path)
    assert lines_of(said, "[rank") == [
        "[rank 0] rank 0 of 2, 0 of 1 on host1",
        "[rank 1] rank 1 of 2, 0 of 1 on host2",
    ]
    assert len(lines_of(said, "[server")) >= 2
    assert status == 0, said


def test_a_running_job_shows_its_secret_nowhere_and_listens_within_its_ports(hosts: Hosts, tmp_path: Path):
    """The secret is neither in the arguments nor in the environment of a process, on any host."""
    show = """
import pathlib
pathlib.Path(sys.argv[1], "secret").write_text(pathlib.Path(os.environ["BPS_SECRET_FILE"]).read_text())
"""
    words = ["run", "-H", "host1:2,host2", "--server-hosts", "host3", script(tmp_path, show + STAY), str(tmp_path)]
    command = hosts.bps(*words, cwd=tmp_path, env={"BPS_PORTS": "30000-30009"})
    await_files(tmp_path, "up-*", 3, command)
    secret = (tmp_path / "secret").read_bytes()
    assert len(secret) == 64
    looked = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            listed = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        looked += b"job.py" in listed
        assert secret not in listed, listed
    assert looked >= 4, "the launcher and three ranks"
    ports = {host: hosts.listening(host) for host in ("host1", "host2", "host3")}
    (tmp_path / "over").touch()
    assert command.wait(60 * harness.PATIENCE) == 0, command.output()
    assert all(30000 <= port <= 30009 for of in ports.values() for port in of), ports
    assert len(ports["host3"]) == 2, f"the server and the scheduler: {ports}"


def test_whatever_is_wrong_with_any_host_is_told_at_once(hosts: Hosts, tmp_path: Path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    old = tmp_path / "old.py"
    init = Path(bps_rdma.__file__)
    old.write_text(init.read_text().replace("from bps_rdma._core import __version__", '__version__ = "0.0.9"'))
    folder = tmp_path / "of the job"
    folder.mkdir()
    hosts.put_over("host1", Path(sys.executable).parent, nothing)
    hosts.put_over("host2", init, old)
    hosts.put_over("host3", tmp_path, nothing)
    status, said = hosts.ended("run", "-H", "host1,host2,host3,nohost", script(folder), cwd=folder)
    for host in ("host1", "host2", "host3"):
        hosts.kill(host)
    assert status == 1
    assert f"no bps on host1: bash: line 1: {sys.executable}: No such file or directory" in said, said
    assert f"host2 has bps_rdma 0.0.9, this host {bps_rdma.__version__}" in said, said
    assert f"no directory {folder} on host3" in said, said
    assert "no way to nohost: ssh: Could not resolve hostname nohost" in said, said
    assert "hint: each host needs" in said, said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nonesuch.py"], "no file nonesuch.py in"),
        pytest.param(["nonesuch", "-x"], "no command nonesuch on host1", marks=pytest.mark.long),
    ],
)
def test_a_command_that_is_not_there(hosts: Hosts, tmp_path: Path, words: list[str], told: str):
    status, said = hosts.ended("run", "-H", "host1", *words, cwd=tmp_path)
    assert told in said, said
    assert status == 1


def test_a_host_whose_key_nobody_knows_is_refused(hosts: Hosts, tmp_path: Path):
    rsh = hosts.rsh.replace("known_hosts", "user_key.pub")
    status, said = hosts.ended("run", "-H", "host1", "--rsh", rsh, script(tmp_path), cwd=tmp_path)
    assert "no way to host1: Host key verification failed" in said, said
    assert status == 1


def test_the_network_is_that_by_which_all_hosts_reach_each_other(hosts: Hosts, tmp_path: Path):
    for host in ("host1", "host2", "host3"):  # as Docker makes it, the same everywhere
        hosts.run_on(host, "ip", "link", "add", "docker0", "type", "bridge")
        hosts.run_on(host, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        hosts.run_on(host, "ip", "link", "set", "docker0", "up")
    hosts.network.part("host2", "host3", "control")  # the launcher reaches both there, and host1 does
    try:
        words = ["run", "-H", "host1:2,host2,host3", "--check", "--json", script(tmp_path)]
        status, said = hosts.ended(*words, cwd=tmp_path)
        assert status == 0, said
        found = json.loads(said)
        data = {host: hosts.network.address(host, "data") for host in ("host1", "host2", "host3")}
        assert {one["host"]: one["address"] for one in found["hosts"]} == data
        assert [one["processes"] for one in found["hosts"]] == [["rank 0", "rank 1"], ["rank 2"], ["rank 3"]]
        assert found["version"] == bps_rdma.__version__
    finally:
        for host in ("host1", "host2", "host3"):
            hosts.run_on(host, "ip", "link", "delete", "docker0")


def test_a_range_of_ports_that_is_too_small(hosts: Hosts, tmp_path: Path):
    env = {"BPS_PORTS": "30000-30003"}
    status, said = hosts.ended("run", "-H", "host1:3,host2", script(tmp_path), cwd=tmp_path, env=env)
    assert "error: only 4 of the 5 ports free that the job needs of BPS_PORTS=30000-30003 on host1\n" in said, said
    assert status == 1


@pytest.mark.long
def test_what_a_shell_prints_at_login_does_no_harm(hosts: Hosts, tmp_path: Path):
    wrapper = tmp_path / "rsh"
    wrapper.write_text('#!/bin/sh\necho "Welcome to $1"; shift; exec sh -c "$*"\n')
    wrapper.chmod(0o755)
    status, said = hosts.ended("run", "-H", "host1:2", "--rsh", str(wrapper), script(tmp_path), cwd=tmp_path)
    assert status == 0, said
    assert len(lines_of(said, "rank")) == 2
    assert "Welcome" not in said, said


def test_a_program_that_leads_nowhere(hosts: Hosts, tmp_path: Path):
    status, said = hosts.ended("run", "-H", "host1", "--rsh", "/nowhere/rsh", script(tmp_path), cwd=tmp_path)
    assert "cannot start '/nowhere/rsh'" in said, said
    assert status == 1


def test_ranks_on_two_hosts_have_a_server_of_a_pool_on_a_third(hosts: Hosts, tmp_path: Path):
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("alice 0123456789abcdef\n")
    env = harness.clean_env(BPS_POOL_KEY_FILE=str(key), BPS_POOL_MEMORY=str(1 << 28), BPS_POOL_JOBS="1")
    # In the host's network alone: what it starts is found by its number.
    inside = ["nsenter", f"--target={hosts.first_process('host3')}", "--net"]
    pool = harness.Command([harness.binary("bps-server"), "--pool"], env, tmp_path / "pool", inside=inside)
    try:
        harness.eventually(lambda: "pool on port 9030" in pool.output(), what=pool.output())
        env = {"BPS_POOL_KEY_FILE": str(key), "BPS_POOL": "host3"}
        servers = "print('servers', __import__('bps_rdma').job.current().process.servers, flush=True)\n"
        status, said = hosts.ended(
            "run", "-H", "host1:1,host2:1", sys.executable, script(tmp_path, servers), cwd=tmp_path, env=env
        )
        assert status == 0, said
        assert lines_of(said, "rank") == ["rank 0 of 2, 0 of 1 on host1", "rank 1 of 2, 0 of 1 on host2"]
        assert "a server of host3:9030 has " in said
        # The one that was lent; of the ranks' own, placement decides.
        assert lines_of(said, "servers")[0] in ("servers 1", "servers 3"), said
        harness.eventually(lambda: "ended with status 0" in pool.output(), what=pool.output())
    finally:
        pool.kill(signal.SIGINT)
        pool.wait(20)
        pool.end()

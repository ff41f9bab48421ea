# SPDX-License-Identifier: Apache-2.0
"""However a job on several hosts ends, nothing of it is left on any of them; a host that dies is named, or survived."""

import os
import pty
import signal
import subprocess
from pathlib import Path

import harness
import pytest
from ssh_hosts import HOSTS, LAUNCHER, Hosts, await_files, lines_of

# Ends by nothing but SIGKILL.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
import os
subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).touch()
while True:
    time.sleep(1)
"""

# Sums until there is a file `over`; a rank that is lost ends the step of the others, and no more.
STEPS = """
import os, pathlib, socket, sys
import numpy as np
import bps_rdma as bps
folder = pathlib.Path(sys.argv[1])
bps.init()
print(f"joins as rank {bps.rank()} of {bps.size()} on {socket.gethostname()}", flush=True)
steps = 0
while True:
    try:
        over = bps.push_pull(np.full(1000, float((folder / "over").exists()), np.float32), average=False, name="over")
        total = bps.push_pull(np.full(1000, 1, np.float32), average=False, name="x")
        bps.commit()
    except bps.RoundAbortedError:
        continue
    assert (total == bps.size()).all()
    steps += 1
    (folder / f"step-of-{bps.size()}-at-{socket.gethostname()}").touch()
    if over[0]:
        break
print(f"ends as one of {bps.size()} on {socket.gethostname()}", flush=True)
bps.shutdown()
"""


def start(hosts: Hosts, folder: Path, text: str, *words: str) -> harness.Command:
    (folder / "job.py").write_text(text)
    return hosts.bps("run", *words, "job.py", str(folder), cwd=folder)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_the_end_of_the_launcher_ends_everything(hosts: Hosts, tmp_path: Path, signum: signal.Signals):
    command = start(hosts, tmp_path, STUBBORN, "-H", "host1:2,host2", "--grace", "0.5")
    await_files(tmp_path, "up-*", 3, command)
    assert "sleep" in hosts.run_on("host1", "sh", "-c", "cat /proc/[0-9]*/comm")
    command.kill(signum)
    status = command.wait(20 * harness.PATIENCE)
    assert status == (-signum if signum == signal.SIGKILL else 128 + signum), command.output()
    hosts.clean()


def test_a_terminal_that_is_closed_ends_everything(hosts: Hosts, tmp_path: Path):
    (tmp_path / "job.py").write_text(STUBBORN)
    ours, its = pty.openpty()
    words = [harness.binary("bps"), "run", "-H", "host1,host2", "--grace", "0.5", "job.py", str(tmp_path)]
    command = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *hosts.inside_launcher(*words)], env=hosts.environment(), cwd=tmp_path,
        stdin=its, stdout=its, stderr=its,
    )  # fmt: skip
    os.close(its)
    try:
        harness.eventually(lambda: len(list(tmp_path.glob("up-*"))) == 2, what="two ranks that are up")
    finally:
        os.close(ours)
    command.wait(20 * harness.PATIENCE)
    hosts.clean()


def test_a_connection_that_is_lost_ends_everything(hosts: Hosts, tmp_path: Path):
    command = start(hosts, tmp_path, STUBBORN, "-H", "host1,host2", "--grace", "0.5")
    await_files(tmp_path, "up-*", 2, command)
    os.kill(ssh_to("host2", command), signal.SIGKILL)
    assert command.wait(20 * harness.PATIENCE) == 128 + signal.SIGKILL, command.output()
    assert "host2 is lost: " in command.output()
    assert "rank 1 on host2 (pid " in command.output()
    assert ") was lost with its host" in command.output()
    hosts.clean()


def ssh_to(host: str, launcher: harness.Command) -> int:
    """The process id of the launcher's ssh to a host."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if parent == launcher.pid and host.encode() in words:
            return int(process.name)
    raise AssertionError(f"no ssh to {host}")


@pytest.mark.long
def test_an_agent_that_is_killed_takes_its_ranks_with_it(hosts: Hosts, tmp_path: Path):
    command = start(hosts, tmp_path, STUBBORN, "-H", "host1,host2", "--grace", "0.5")
    await_files(tmp_path, "up-*", 2, command)
    hosts.run_on("host2", "pkill", "-KILL", "-f", "bps_rdma.launch.remote.agent")  # of its own processes alone
    assert command.wait(20 * harness.PATIENCE) == 128 + signal.SIGKILL, command.output()
    assert "host2 is lost: " in command.output()
    hosts.clean()


def test_the_rank_that_fails_first_is_named_with_its_host(hosts: Hosts, tmp_path: Path):
    fails = "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    command = start(hosts, tmp_path, fails, "-H", "host1,host2")
    assert command.wait(60 * harness.PATIENCE) == 3, command.output()
    assert "error: rank 1 on host2 (pid " in command.output()


@pytest.mark.parametrize("dies", ["host1", pytest.param("host3", marks=pytest.mark.long)])
def test_a_host_that_dies_is_survived(hosts: Hosts, tmp_path: Path, dies: str):
    command = start(hosts, tmp_path, STEPS, "-H", "host1,host2,host3", "--min-np", "2")
    await_files(tmp_path, "step-of-3-at-*", 3, command)
    hosts.kill(dies)
    await_files(tmp_path, "step-of-2-at-*", 2, command)
    (tmp_path / "over").touch()
    assert command.wait(60 * harness.PATIENCE) == 0, command.output()
    said = command.output()
    assert f"{dies} is lost: " in said
    assert f"rank {HOSTS.index(dies)} on {dies} (pid " in said
    assert "the job goes on with 2 ranks" in said
    assert lines_of(said, "ends") == [f"ends as one of 2 on {host}" for host in HOSTS if host != dies]


@pytest.mark.long  # waits for time-outs
def test_a_network_that_is_cut_without_a_word_is_survived(hosts: Hosts, tmp_path: Path):
    command = start(hosts, tmp_path, STEPS, "-H", "host1,host2,host3", "--min-np", "2")
    await_files(tmp_path, "step-of-3-at-*", 3, command)
    hosts.network.cut("host3", "all", "both")
    await_files(tmp_path, "step-of-2-at-*", 2, command)
    (tmp_path / "over").touch()
    assert command.wait(60 * harness.PATIENCE) == 0, command.output()
    assert "host3 is lost: Timeout, server host3 not responding" in command.output()
    harness.eventually(lambda: not hosts.jobs_on("host3"), 60, "the end of what the host had of the job")


@pytest.mark.long  # waits for answers that do not come
def test_a_launcher_that_hosts_do_not_reach_has_no_scheduler(hosts: Hosts, tmp_path: Path):
    for host in HOSTS:
        hosts.network.part(host, LAUNCHER, "data")
    (tmp_path / "job.py").write_text(STEPS)
    words = ["run", "-H", "host1,host2", "--min-np", "1", "--check", "job.py", str(tmp_path)]
    status, said = hosts.ended(*words, cwd=tmp_path, env={"BPS_INTERFACE": "data"})
    assert status == 0, said
    assert f"host1 at {hosts.network.address('host1', 'data')}: rank 0, scheduler" in said
    assert "note: not all hosts reach this one, so the scheduler runs on host1" in said


def test_what_a_dead_host_had_is_started_on_one_with_a_free_slot(hosts: Hosts, tmp_path: Path):
    words = ["-H", "host1,host2,host3", "-np", "2", "--min-np", "1", "--restarts", "1"]
    command = start(hosts, tmp_path, STEPS, *words)
    await_files(tmp_path, "step-of-2-at-host2", 1, command)
    hosts.kill("host2")
    await_files(tmp_path, "step-of-2-at-host3", 1, command)
    (tmp_path / "over").touch()
    assert command.wait(60 * harness.PATIENCE) == 0, command.output()
    said = command.output()
    assert "and it is started again" in said
    assert lines_of(said, "ends") == ["ends as one of 2 on host1", "ends as one of 2 on host3"]


@pytest.mark.long
def test_a_server_of_a_dead_host_is_started_on_another_one(hosts: Hosts, tmp_path: Path):
    words = ["-H", "host1:2", "--server-hosts", "host2,host3", "--min-np", "1", "--restarts", "1"]
    command = start(hosts, tmp_path, STEPS, *words)
    await_files(tmp_path, "step-of-2-at-*", 1, command)
    hosts.kill("host3")
    harness.eventually(lambda: command.output().count("this is server 1") == 2, what="another server 1")
    (tmp_path / "over").touch()
    assert command.wait(60 * harness.PATIENCE) == 0, command.output()
    said = command.output()
    assert "server 1 on host3 (pid " in said
    assert "the job goes on with 1 server, and it is started again" in said
    assert lines_of(said, "ends") == ["ends as one of 2 on host1"] * 2


@pytest.mark.long
def test_user_signals_reach_the_ranks(hosts: Hosts, tmp_path: Path):
    waits = """
import os, pathlib, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1], "up-" + os.environ["RANK"]).touch()
while True:
    signal.pause()
"""
    command = start(hosts, tmp_path, waits, "-H", "host1,host2")
    await_files(tmp_path, "up-*", 2, command)
    command.kill(signal.SIGUSR1)
    assert command.wait(60 * harness.PATIENCE) == 0, command.output()

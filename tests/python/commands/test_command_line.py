# SPDX-License-Identifier: Apache-2.0
"""The commands as one family: their help, versions, exit statuses and spellings. All in this process, by their main."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

import bps_rdma
from bps_rdma.launch import bpslaunch
from bps_rdma.tools import bench, compare
from bps_rdma.tools.bench import allreduce

COMMANDS = ("run", "doctor", "why", "top", "dump", "pool", "tune", "bench", "allreduce", "ddp-bench", "launch", "env",
            "config", "version", "trace")  # fmt: skip


def test_help_fits_into_80_columns_and_is_not_cut(call):
    listed = call("--help")[1]
    assert re.findall(r"^  ([a-z-]+) ", listed.split("Commands:")[1], re.MULTILINE) == list(COMMANDS)
    subcommands = ("trace merge", "trace summary")
    assert re.findall(r"^  (merge|summary) ", call("trace", "--help")[1], re.MULTILINE) == ["merge", "summary"]
    for name in (*COMMANDS, *subcommands):
        if name == "ddp-bench":
            pytest.importorskip("torch")
        status, out, _ = call(*name.split(), "--help")
        assert status == 0, name
        assert all(len(line) <= 80 for line in out.splitlines()), name
        assert "xit status" in out, name
        assert "xample" in out, name
        assert "..." not in re.sub(r"COMMAND(\}| \[ARGS\])?\.\.\.", "", out), name
        assert name in subcommands or f"\n  {name} " in listed
    assert "..." not in listed.split("Commands:")[1]
    assert "\x1b" not in listed


def test_the_old_names_are_the_same_commands(call):
    pytest.importorskip("torch")
    pairs = (
        ("bench", bench.main),
        ("allreduce", allreduce.main),
        ("ddp-bench", compare.main),
        ("launch", bpslaunch.main),
    )
    for name, main in pairs:
        new, old = call(name, "--help")[1], call("--help", main=main)[1]
        assert new.partition("\n")[2] == old.partition("\n")[2], name


def test_versions(call):
    assert call("--version") == call("version") == (0, f"bps_rdma {bps_rdma.__version__}\n", "")
    found = json.loads(call("version", "--json")[1])
    assert found["bps_rdma"] == bps_rdma.__version__
    assert found["numpy"]
    assert found["rdma"] is True  # a build lacks it only when told to, and CI tells none


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bogus",), "`bps --help`"),
        (("run", "--bogus"), "`bps run --help`"),
        (("run", "true"), "bps run -np 2"),
        (("run", "-np", "2", "--restarts", "1", "true"), "--min-np"),
        (("tune", "--hosts"), "`bps tune --help`"),
        (("trace", "merge", "--out"), "`bps trace merge --help`"),
        (("bench", "--bogus"), "`bps bench --help`"),
        (("bench", "--plot", "x.bmp"), ".png, .svg, .pdf"),
        (("bench", "--size-mb", "nan"), "4096, 64K, 1.5M or 1G"),
        (("launch",), "DMLC_ROLE"),
    ],
)
def test_mistakes_end_with_2_and_a_hint(call, arguments, says):
    status, _, err = call(*arguments)
    assert status == 2, err
    assert "error: " in err
    assert says in err.split("hint: ")[1]


@pytest.mark.parametrize("setting", [{"BPS_TIMEOUT": "abc"}, {"BPS_TRANSPORT": "foo"}])
def test_settings_are_checked_where_one_looks(call, monkeypatch, setting):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    for command in ("config", "doctor"):
        status, out, err = call(command)
        assert (status, out) == (2, "")
        for name, value in setting.items():
            assert f"{name}='{value}' is not" in err


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (("-np2", "echo", "-np3"), "-np3\n-np3\n"),
        (("-np=2", "echo"), "\n\n"),
        (("--np", "1", "--prefix", "echo", "a"), "[rank 0] a\n"),
        (("--grace", "1", "-np1", "--", "echo", "-m"), "-m\n"),
        (("-n1", "-m", "json.tool", "--help"), "usage: python -m json.tool"),
    ],
)
def test_spellings_of_run(call, arguments, out):
    status, shown, err = call("run", *arguments)
    assert status == 0, err
    assert shown.startswith(out)


def test_run_says_that_it_does_not_take_the_least_number_of_ranks_from_a_variable(call, monkeypatch):
    monkeypatch.setenv("BPS_MIN_WORKERS", "1")
    assert call("run", "-np", "1", "true")[::2] == (0, "note: BPS_MIN_WORKERS has no effect here; pass --min-np 1\n")
    monkeypatch.setenv("RANK", "0")  # then it is that of the job around this one
    assert call("run", "-np", "1", "true") == (0, "", "")


@pytest.mark.parametrize(
    ("shell", "status", "says"),
    [
        ("bps config >&-", 0, ""),
        ("bps bogus 2>&-", 2, ""),
        ("bps run -np 1 echo out >&-", 0, ""),
        ("bps run -np 1 echo out >/dev/full", 1, "error: cannot write: No space left on device"),
        ("bps config >/dev/full", 1, "error: cannot write: No space left on device"),
        ("PYTHONIOENCODING=ascii BPS_JOB_ID=\u00e9 bps config | grep -q '\\\\xe9'", 0, ""),
    ],
)
def test_outputs_that_are_closed_or_full_or_take_only_ascii(shell, status, says):
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = harness.run_command(["bash", "-c", shell], env=harness.clean_env(PATH=paths))
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_variable_that_is_no_text_is_named(call, monkeypatch):
    for name in ("BPS_TIMEOUT", "BPS_ROOT_URI", "MASTER_ADDR"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "\udcff")  # the byte 0xff
            for start in (bps_rdma.init, bps_rdma.config):
                with pytest.raises(bps_rdma.InvalidArgumentError, match=f"{name} is not a text in UTF-8"):
                    start()
            status, _, errors = call("config")
            assert (status, errors.splitlines()[0]) == (2, f"error: {name} is not a text in UTF-8")
    with monkeypatch.context() as patch:
        patch.setenv("BPS_SECRET", "\udcff")
        assert call("config")[0] == 0


def test_completion_and_the_module():
    env = harness.clean_env(_BPS_COMPLETE="complete_bash", COMP_WORDS="bps all", COMP_CWORD="1")
    code = "import sys; sys.argv[0] = 'bps'; from bps_rdma.cli import main; main()"
    done = harness.run_command([sys.executable, "-c", code], env=env)
    assert "allreduce" in done.stdout, done.stderr
    done = harness.run_command([sys.executable, "-m", "bps_rdma", "--version"])
    assert done.stdout == f"bps_rdma {bps_rdma.__version__}\n", done.stderr


def sums(bps: Any) -> float:
    return float(bps.push_pull(np.ones(3), average=False)[0])


@pytest.mark.parametrize(
    ("role", "names"),
    [("bps-server", ("BPS_TRANSPORT", "--rank")), ("bps-scheduler", ("BPS_MIN_WORKERS", "--port", "75"))],
)
def test_the_binaries_name_their_variables(role, names):
    binary = harness.binary(role)
    shown = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=30, check=True)
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    for name in (*names, "BPS_NUM_WORKERS", "BPS_ROOT_URI", "BPS_SECRET_FILE", "Example", "exit status"):
        assert name in shown.stdout
    known = {name for one in bps_rdma.config() for name in (one.name, *one.aliases)}
    assert set(re.findall(r"(?:BPS|DMLC|BYTEPS)_[A-Z_]+", shown.stdout)) <= known
    for word in ("--bogus", "extra"):
        wrong = subprocess.run([binary, word], capture_output=True, text=True, timeout=30, check=False)
        assert wrong.returncode == 2
        assert word in wrong.stderr


def test_the_server_says_when_it_is_ready():
    server = harness.binary("bps-server")
    wrong = subprocess.run([server, "--rank", "x"], capture_output=True, timeout=30, check=False)
    assert wrong.returncode == 2
    with harness.start(sums, workers=2, servers=1) as job:
        assert job.results() == [2, 2]
        said = job.log("server 0")
    assert f"port {job.port}, and for 2 workers and 1 server" in said
    assert "ready; this is server 0" in said


@pytest.mark.parametrize("first_in_a_container", [False, True])
def test_a_signal_ends_a_server_also_where_it_is_process_1(first_in_a_container):
    """The kernel drops signals to process 1 of a namespace that it has no handler for."""
    # A shell starts what runs in its background with SIGINT ignored, and so would be all that this test starts.
    command = ["env", "--default-signal=INT", str(harness.binary("bps-server"))]
    if first_in_a_container:
        command = ["unshare", "--fork", "--pid", *command]  # env becomes the server, and is process 1
        if subprocess.run(["unshare", "--fork", "--pid", "true"], check=False).returncode != 0:
            pytest.skip("needs a process namespace of its own")
    env = harness.clean_env() | {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1",
                                 "DMLC_PS_ROOT_PORT": "9"}  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        started = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        server = started.pid
        try:
            assert started.stderr is not None
            assert "waiting for the scheduler" in started.stderr.readline()
            if first_in_a_container:
                server = int(Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text())
            os.kill(server, number)
            assert started.wait(10) == (128 + number if first_in_a_container else -number)
        finally:
            if started.poll() is None:
                os.kill(server, signal.SIGKILL)
            started.communicate()


@pytest.mark.parametrize("command", ["why", "top", "dump --torch out"])
def test_without_a_job_the_inspecting_commands_say_how_to_name_one(command, tmp_path):
    """The name is that of no job, so that others on this machine do not matter."""
    done = harness.run_command(
        [sys.executable, "-P", "-m", "bps_rdma", *command.split(), "--job", "no such job"], cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: none of your processes on this machine takes part in a job" in done.stderr
    assert "bps " + command.split()[0] + " HOST:PORT" in done.stderr

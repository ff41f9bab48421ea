# SPDX-License-Identifier: Apache-2.0
"""What the commands print: whole in 80 columns, in colours on terminals only, and not with NO_COLOR."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from typing import Any

import harness
import pytest
from rich.console import Console

import bps_rdma
from bps_rdma import terminal
from bps_rdma.tools import doctor
from bps_rdma.tools.inspection import top
from bps_rdma.tools.inspection.job_state import JobState
from bps_rdma.tools.trace import cli as trace_cli
from bps_rdma.tools.tune import command as tune
from bps_rdma.tools.tune.measure import Trial

COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|9[0-7])[;m]")


def in_80_columns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], show: Any) -> str:
    """What `show` prints, after it was checked that every line fits and that no cell was cut."""
    monkeypatch.setenv("COLUMNS", "80")
    show()
    shown = capfd.readouterr().out
    assert shown.strip()
    assert all(len(line) <= 80 for line in shown.splitlines()), shown
    assert "\u2026" not in shown, shown
    return shown


def without_breaks(text: str) -> str:
    return re.sub(r"\s+", "", text)


def test_settings(monkeypatch, capfd):
    monkeypatch.setenv("BPS_ROOT_URI", long := "a-host-with-a-long-name." * 4 + "example.org")
    shown = in_80_columns(monkeypatch, capfd, lambda: call("config"))
    for setting in bps_rdma.config():
        assert f"  {setting.name} " in shown
    head = next(line for line in shown.splitlines() if "meaning" in line)
    block = shown.split("BPS_ROOT_URI", 1)[1].split("BPS_ROOT_PORT")[0].splitlines()
    begin, end = head.index("value"), head.index("source")
    parts = [
        block[0][begin - len("  BPS_ROOT_URI") : end - len("  BPS_ROOT_URI")],
        *(line[begin:end] for line in block[1:]),
    ]
    assert "".join(part.strip() for part in parts) == long


def test_names_in_brackets_are_printed_as_they_are(monkeypatch, capfd):
    """Tables of rich would take them for colours, and end with an error at [/]."""
    name = "[/]w[bias]:x:"
    monkeypatch.setenv("BPS_ROOT_URI", name)
    for show in (lambda: call("config"), lambda: trace_cli._print("Waits", [{"name": name, "rank": 1}])):
        assert name in in_80_columns(monkeypatch, capfd, show)


def test_settings_in_a_narrow_terminal_keep_their_words(monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "40")
    call("config")
    shown = capfd.readouterr().out
    assert all(len(line) <= 40 for line in shown.splitlines()), shown
    assert "BPS_ROLE= (default)\n  worker, server, scheduler or joint;" in shown


def call(*arguments: str) -> None:
    from bps_rdma import cli

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bps", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code


def test_members_of_a_job(monkeypatch, capfd):
    one = top.Row(
        "worker 127 + server 127", "node-0123.cluster.example.org", 4194304, "waiting", cpu_percent=1234.0,
        memory_bytes=123456789012, operations_per_s=98765.0, tensor_bytes_per_s=12.3e9, sent_bytes_per_s=99.9e6,
        received_bytes_per_s=99.9e6, credits=1234, stalls_per_s=12345.0, open_operations=1000, oldest_ms=123456,
        awaited_by=128, last_percent=100.0, is_slowest=True, oldest_round_ms=123456, round_waits_for=list(range(9)),
    )  # fmt: skip
    rows = [one, replace(one, name="scheduler", state="silent", memory_bytes=None, operations_per_s=None)]
    state = JobState(name="a" * 40)
    shown = in_80_columns(monkeypatch, capfd, lambda: top.print_members(state, rows))
    assert "4194304" in shown
    assert "98765" in shown
    wide = Console(width=300, file=io.StringIO())
    wide.print(top._table(state, rows, 300))
    assert "stalls/s" in wide.file.getvalue()  # type: ignore[attr-defined]

    monkeypatch.delenv("COLUMNS")
    top.print_members(state, rows)
    assert "received/s" in capfd.readouterr().out, "in a pipe a heading is split"


def test_no_word_of_the_members_of_a_small_job_is_broken(monkeypatch, capfd):
    row = top.Row(
        "rank 0 + server 0", "node7", 4194304, "waiting", cpu_percent=57.0, memory_bytes=331e6, operations_per_s=737.0,
        tensor_bytes_per_s=51.6e3, sent_bytes_per_s=51.6e3, received_bytes_per_s=51.6e3, credits=4, stalls_per_s=0.0,
        open_operations=1, oldest_ms=100, awaited_by=1, last_percent=50.0, is_slowest=False, oldest_round_ms=0,
        round_waits_for=[],
    )  # fmt: skip
    shown = in_80_columns(monkeypatch, capfd, lambda: top.print_members(JobState(name="job"), [row]))
    whole = {"member", "host", "memory", "tensors/s", "awaited", "server", "node7", "4194304", "waiting", "331"}
    assert whole <= set(shown.split()), shown


def test_traces_trials_and_devices(monkeypatch, capfd):
    rows = [{"tensor": "decoder.layers.31.self_attention.linear_qkv.weight" * 2, "rank": 127, "calls": 123456,
             "total_ms": 1234567.891, "wait_ms": 1234.5, "server_ms": 1234.5}]  # fmt: skip
    shown = in_80_columns(monkeypatch, capfd, lambda: trace_cli._print("tensors", rows))
    assert rows[0]["tensor"] in without_breaks(re.sub(r" +[0-9. ]+$", "", shown, flags=re.MULTILINE))
    trials = [Trial(1 << 22, 1.25, 1.0, 1.5), Trial(None, 123.4, 120.0, 130.0)]
    in_80_columns(
        monkeypatch, capfd, lambda: tune._print_trials(terminal.wide_console(), "t", "what shows", trials, None)
    )
    gid = {
        "index": 12,
        "gid": "",
        "type": "RoCE v2",
        "address": "fe80:0000:0000:0000:0123:4567:89ab:cdef",
        "interface": "enp129s0f0np0",
    }
    port = {"number": 1, "gids": [gid]}
    report = doctor.Findings(rdma={"devices": [{"name": "mlx5_bond_12", "ports": [port]}]})
    shown = in_80_columns(monkeypatch, capfd, lambda: doctor._show(report, terminal.wide_console(markup=True)))
    assert "mlx5_bond_12" in without_breaks(shown)


@pytest.mark.long
def test_a_benchmark_of_several_kinds(tmp_path):
    env = harness.clean_env(COLUMNS="80")
    command = [harness.binary("bps"), "bench", "--ops", "push_pull,reduce_scatter", "--dtypes", "float32,bfloat16",
               "--sizes", "4K", "--iters", "3", "--calls", "2", "--json", "out.json"]  # fmt: skip
    done = harness.run_command(command, env=env, cwd=tmp_path, within=120)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    assert "\u2026" not in done.stdout
    assert "reduce_scatter, bfloat16" in done.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 4


def on_a_terminal(*command: str, **env: str) -> tuple[int, str]:
    """Exit status, and what a terminal of 80 columns gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    started = subprocess.Popen(
        command,
        env=harness.clean_env(TERM="xterm-256color", **env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd="/",
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # nobody has the other end any more
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return started.wait(60), shown.decode()


@pytest.mark.parametrize(
    ("command", "status", "has_colours"),
    [(("doctor", "--no-transfer"), 0, True), (("run", "--bogus"), 2, True), (("config",), 0, False)],
)
def test_colours_are_for_terminals(command, status, has_colours):
    bps = harness.binary("bps")
    done = harness.run_command([bps, *command], env=harness.clean_env(TERM="xterm-256color"))
    assert done.returncode == status, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    for env, coloured in (({}, has_colours), ({"NO_COLOR": "1"}, False)):
        status_there, shown = on_a_terminal(bps, *command, **env)
        assert status_there == status, shown
        assert bool(COLOUR.search(shown)) is coloured, shown
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
        assert all(len(line) <= 80 for line in plain.splitlines() if not line.startswith("hint"))

# SPDX-License-Identifier: Apache-2.0
"""How a machine starts its pool: examples/slurm/pool-prolog.sh and examples/systemd/bps-pool.service."""

import os
import shutil
import signal
from pathlib import Path

import harness
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
PROLOG = EXAMPLES / "slurm" / "pool-prolog.sh"


@pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs a prolog as root")
def test_the_prolog_starts_one_pool(tmp_path):
    keys, log = tmp_path / "keys", tmp_path / "log"
    env = harness.clean_env(BPS_POOL_KEY_FILE=str(keys), BPS_POOL_PORT=str(harness.free_port()), POOL_LOG=str(log))
    env["PATH"] = f"{Path(harness.binary('bps-server')).parent}:{env['PATH']}"
    assert harness.run_command([str(PROLOG)], env=env).returncode == 0
    assert not log.exists()  # no keys, no pool
    keys.touch(0o600)
    keys.write_text("alice 0123456789abcdef\n")
    assert harness.run_command([str(PROLOG)], env=env).returncode == 0
    harness.eventually(lambda: "pool on port" in log.read_text(), what=log.read_text())
    try:
        assert len(_pools(env["BPS_POOL_PORT"])) == 1
        assert harness.run_command([str(PROLOG)], env=env).returncode == 0
        done = harness.run_command([harness.binary("bps"), "pool", f"127.0.0.1:{env['BPS_POOL_PORT']}"], env=env)
        assert "0 of 4 jobs" in done.stdout, done.stderr
        assert log.read_text().count("\n") == 1
    finally:
        for pid in _pools(env["BPS_POOL_PORT"]):
            os.kill(pid, signal.SIGTERM)
    harness.eventually(lambda: not _pools(env["BPS_POOL_PORT"]))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit_and_leaves_servers_alone(tmp_path):
    text = (EXAMPLES / "systemd" / "bps-pool.service").read_text()
    assert "KillMode=process\n" in text
    unit = tmp_path / "bps-pool.service"
    unit.write_text(text.replace("/usr/local/bin/bps-server", harness.binary("bps-server")))
    done = harness.run_command(["systemd-analyze", "verify", str(unit)])
    assert (done.returncode, [line for line in done.stderr.splitlines() if "bps-pool" in line]) == (0, [])


def _pools(port: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if words == b"bps-server\0--pool\0" and f"BPS_POOL_PORT={port}".encode() in variables:
            found.append(int(process.name))
    return found

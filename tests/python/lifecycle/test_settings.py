# SPDX-License-Identifier: Apache-2.0
"""`bps config` and init(): bad values, secrets, and variables that mean nothing here."""

import json
import subprocess
import sys

import harness
import pytest


def config(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from bps_rdma.cli import main; main()", "config", *options]
    return harness.run_command(command, env=harness.clean_env(**env))


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_bad_value_ends_with_2_and_is_explained(options):
    done = config(*options, BPS_TIMEOUT="abc")
    assert done.returncode == 2
    assert "BPS_TIMEOUT='abc' is not a number of seconds above 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [(), ("--json",), ("--markdown",)])
def test_secrets_are_never_shown(options):
    done = config(*options, BPS_SECRET="open-sesame")
    assert done.returncode == 0, done.stderr
    assert "open-sesame" not in done.stdout + done.stderr


def test_a_secret_is_set_or_unset():
    def shown(**env: str) -> str:
        settings = {one["name"]: one["value"] for one in json.loads(config("--json", **env).stdout)}
        return str(settings["BPS_SECRET"])

    assert shown(BPS_SECRET="open-sesame") == "set"
    assert shown() == "unset"


def test_variables_that_mean_nothing_are_named_once():
    done = config(BPS_PARTITON_BYTES="1", BYTEPS_NUMA_ON="1", BPS_HEARTBEAT_INTERVAL="1")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["warning:", "BPS_HEARTBEAT_INTERVAL"], ["warning:", "BPS_PARTITON_BYTES"], ["note:", "BYTEPS_NUMA_ON"]
    ]  # fmt: skip
    assert "did you mean BPS_PARTITION_BYTES?" in lines[1]


def test_init_warns_once_of_a_misspelt_variable():
    code = "import bps_rdma as b; b.init(); b.shutdown(); b.init(); b.shutdown()"
    done = harness.run_command([sys.executable, "-c", code], env=harness.clean_env(BPS_TRANSPROT="tcp"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("BPS_TRANSPROT is not a setting and has no effect; did you mean BPS_TRANSPORT?") == 1

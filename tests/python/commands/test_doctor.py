# SPDX-License-Identifier: Apache-2.0
"""`bps doctor`: what it says of this machine, and a verified transfer between two of them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import harness
import numpy as np
import pytest
from bodies.doctor import DOCTOR, ENV, doctor, two_doctors_sum_together


def test_a_machine_that_needs_nothing_more_is_healthy():
    status, checks = doctor(env={"BPS_TRANSPORT": "tcp"})
    assert status == 0
    assert {"system", "locked memory", "shared memory", "verbs libraries"} <= checks.keys()
    assert all(check["hint"] for check in checks.values() if check["state"] != "ok")


def test_what_is_said_of_shared_memory_is_so(alone):
    """Anonymous memory, of which as much is free as a job can have; no file of it is in /dev/shm."""
    before = harness.shared_memory_files()
    array = alone.empty(1 << 20, np.uint8)
    array[:] = 1
    mapped = Path("/proc/self/maps").read_text()
    assert "/memfd:bps" in mapped
    assert "/dev/shm" not in mapped
    assert harness.shared_memory_files() <= before
    said = doctor(env={"BPS_TRANSPORT": "tcp"})[1]["shared memory"]
    assert said["state"] == "ok"
    free = re.fullmatch(r"anonymous \(memfd\), of which (\d+) MiB are free; /dev/shm is not used", said["fact"])
    assert free, said
    total = int(re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) >> 10
    assert 0 < int(free[1]) <= total


def test_what_is_in_the_way_of_the_settings_is_bad_and_has_a_remedy():
    status, checks = doctor(env={"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": "=nosuch9"})
    assert status == 1
    bad = [check for check in checks.values() if check["state"] == "bad"]
    assert bad
    assert all(check["hint"] for check in bad)


def test_a_setting_that_cannot_be_read_is_named():
    done = harness.run_command([*DOCTOR, "--json"], env=ENV | {"BPS_RDMA_TIMEOUT": "99"})
    assert done.returncode == 2
    assert "BPS_RDMA_TIMEOUT='99' is not a whole number from 1 to 31" in done.stderr


@pytest.mark.long_over("shm")  # doctors look at two hosts
def test_two_doctors_sum_together(transport):
    two_doctors_sum_together(transport)


def test_without_a_default_route_the_command_names_an_address_that_leads_to_other_hosts():
    unshare = ["unshare", "--map-root-user", "--net"]
    cards = "ip link set lo up && ip link add card0 type veth peer name card1 && ip link set card0 up"
    network = f"{cards} && ip address add 10.97.1.1/24 dev card0 && exec"
    if subprocess.run([*unshare, "sh", "-c", f"{network} true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no network namespace with a card of its own can be made here")
    done = harness.run_command(
        [*unshare, "sh", "-c", f'{network} "$@"', "sh", *DOCTOR, "--no-transfer", "--serve", "--wait", "1"], env=ENV
    )
    assert "bps doctor --peer 10.97.1.1:" in done.stderr


def test_a_peer_that_is_not_there():
    options = ["--peer", f"127.0.0.1:{harness.free_port()}", "--code", "abcd", "--timeout", "2"]
    status, checks = doctor(*options, env={"BPS_TRANSPORT": "tcp"})
    assert status == 1
    assert checks["peer"]["state"] == "bad"
    assert "bps doctor --serve" in checks["peer"]["hint"]
    assert "scheduler" not in checks["peer"]["fact"] + checks["peer"]["hint"]


@pytest.mark.parametrize("options", [["--peer", "somewhere"], ["--peer", "127.0.0.1:9", "--no-transfer"]])
def test_a_peer_without_a_port_or_a_code_is_an_error_of_the_command_line(options):
    done = harness.run_command([*DOCTOR, *options], env=ENV)
    assert done.returncode == 2, done.stdout
    assert "needs the form HOST:PORT, and --code" in done.stderr
    assert "bps doctor --serve" in done.stderr


def test_a_wrong_code_is_refused():
    with subprocess.Popen(
        [*DOCTOR, "--no-transfer", "--serve", "--wait", "1000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV | {"BPS_TRANSPORT": "tcp"}, cwd="/",
    ) as first:  # fmt: skip
        try:
            assert first.stderr is not None
            first.stderr.readline()
            where = shlex.split(first.stderr.readline())[3]
            status, checks = doctor("--peer", where, "--code", "0000", "--timeout", "60", env={"BPS_TRANSPORT": "tcp"})
            assert status == 1
            assert "secret" in checks["peer"]["fact"]
            assert "--code" in checks["peer"]["hint"]
            assert first.poll() is None, "it waits for one with the right code"
        finally:
            first.terminate()

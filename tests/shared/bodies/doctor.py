# SPDX-License-Identifier: Apache-2.0
"""Two machines that `bps doctor` looks at."""

import json
import os
import re
import shlex
import subprocess
import sys

import harness

ENV = {name: value for name, value in os.environ.items() if not name.startswith(("BPS_R", "BPS_T", "DMLC_"))}
DOCTOR = [sys.executable, "-c", "from bps_rdma.cli import main; main()", "doctor"]


def doctor(*options, env=None):
    """Its status and its report."""
    done = harness.run_command([*DOCTOR, "--json", "--no-transfer", *options], env=ENV | (env or {}))
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def two_doctors_sum_together(transport, **more):
    env = ENV | {"BPS_TRANSPORT": transport} | more
    with subprocess.Popen(
        [*DOCTOR, "--json", "--no-transfer", "--serve", "--wait", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd="/",
    ) as first:  # fmt: skip
        assert first.stderr is not None
        assert "waiting" in first.stderr.readline()
        printed = shlex.split(first.stderr.readline())
        assert printed[:2] == ["bps", "doctor"]
        status, checks = doctor(*printed[2:], env=env)
        assert status == 0, checks
        out, _ = first.communicate(timeout=60 * harness.PATIENCE)
    assert first.returncode == 0, out
    for peer in (checks["peer"], {c["name"]: c for c in json.loads(out)["checks"]}["peer"]):
        assert re.search(rf"64 MiB summed with it over {transport} and verified: [0-9.]+ GB/s", peer["fact"])

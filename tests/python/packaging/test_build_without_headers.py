# SPDX-License-Identifier: Apache-2.0
"""A build without the headers of verbs ends with what to install; RDMA is left out only where that was asked for."""

import shutil
import subprocess
from pathlib import Path

import harness
import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").exists(), reason="not in a checkout"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake"),
]


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return harness.run_command(["cmake", "-S", ROOT, "-B", folder, "-DBPS_PYTHON=OFF", *options], within=120)


@pytest.mark.parametrize("missing", ["VERBS", "RDMACM"])
def test_missing_headers_are_an_error(tmp_path, missing):
    done = configure(tmp_path, f"-DBPS_{missing}_HEADERS=")  # what was looked for already, and not found
    assert done.returncode != 0, done.stdout
    told = " ".join(done.stderr.split())
    assert "error: the RDMA transport needs infiniband/verbs.h and rdma/rdma_cma.h" in told
    assert "libibverbs-dev librdmacm-dev" in told
    assert "rdma-core-devel" in told
    assert "-DBPS_RDMA=OFF" in told


def test_off_needs_no_headers_and_says_so(tmp_path):
    done = configure(tmp_path, "-DBPS_RDMA=OFF", "-DBPS_VERBS_HEADERS=", "-DBPS_RDMACM_HEADERS=")
    assert done.returncode == 0, done.stderr
    assert "this build has no RDMA transport" in done.stdout

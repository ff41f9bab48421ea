# SPDX-License-Identifier: Apache-2.0
"""The fixture of all tests of Slurm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import harness
import pytest
from slurm_lab import Slurm, run


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """The cluster; afterwards no job runs, and none has left anything."""
    assert "BPS_TEST_SLURM" in os.environ, "run it by ci/slurm/run"
    it = Slurm()
    yield it
    run("scancel", "--user=root")
    deadline = time.monotonic() + 10 * harness.PATIENCE
    while (left := it.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []

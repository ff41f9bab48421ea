# SPDX-License-Identifier: Apache-2.0
"""The fixture of all tests of Slurm."""

import contextlib
import os
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
    with contextlib.suppress(harness.WaitedInVainError):
        harness.eventually(lambda: not it.left())
    assert it.left() == []

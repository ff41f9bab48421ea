# SPDX-License-Identifier: Apache-2.0
"""What all suites have in common: which tests run only on request, and which want the machine for themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# pytest has put this folder on the path, and `import torch` would find the folder torch where there is no other.
sys.path[:] = [one for one in sys.path if Path(one) != Path(__file__).parent]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a `transport` runs over each of TRANSPORTS of the module that it is collected in.

    tests/rdma imports such tests from tests/python, and says TRANSPORTS = ["rdma"].
    """
    marks = metafunc.definition.iter_markers("parametrize")
    if "transport" in metafunc.fixturenames and not any("transport" in str(mark.args[0]) for mark in marks):
        metafunc.parametrize("transport", getattr(metafunc.module, "TRANSPORTS", ["shm", "tcp"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long forms to `ci/test --all`, which sets BPS_TEST_ALL."""
    if os.environ.get("BPS_TEST_ALL"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


def pytest_sessionfinish() -> None:
    """What ci/test says of a step's processor time includes the ranks of tests, which are no children of pytest."""
    if "harness" in sys.modules:
        sys.modules["harness"].end_forkserver()

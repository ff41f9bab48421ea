"""What all suites have in common: which tests run only on request, and which want the machine for themselves."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long forms to `ci/test --all`, which sets BPS_TEST_ALL."""
    if os.environ.get("BPS_TEST_ALL"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]

# SPDX-License-Identifier: Apache-2.0
"""Tests on several hosts, each a kernel of its own with RDMA: `ci/lab/run pytest tests/lab`, or `ci/test lab`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab

HERE = Path(__file__).parent
HOSTS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "BPS_LAB_KERNEL" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="not in the lab; start this by ci/lab/run"))


@pytest.fixture(scope="session")
def booted(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """One lab at a time. A test that needs another one gives it as parameter: hosts, rails."""
    hosts, rails = getattr(request, "param", (HOSTS, 1))
    with Lab(hosts, rails) as lab:
        yield lab


@pytest.fixture
def lab(booted: Lab) -> Lab:
    """Its hosts run, four if the test does not say, with nothing between them cut, slow or disturbed."""
    booted.reset()
    return booted

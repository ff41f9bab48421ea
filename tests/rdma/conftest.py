# SPDX-License-Identifier: Apache-2.0
"""Tests on real verbs: of the device that BPS_TEST_HCA names. `ci/test rdma` runs them in the VM; see docs."""

from collections.abc import Iterator
from pathlib import Path

import fabric
import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says of each test whether it can run here. Tests of other suites that are marked `rdma` need the device, too.

    Of those a landing runs the first case each over RDMA: their other cases are about what all transports share.
    """
    begun = set()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("rdma")
        elif not item.get_closest_marker("rdma"):
            continue
        elif "transport" in getattr(getattr(item, "callspec", None), "params", {}):
            if item.callspec.params["transport"] == "rdma" and (item.path, item.originalname) in begun:
                item.add_marker("long")
            begun.add((item.path, item.originalname))
        if not fabric.HCA:
            item.add_marker(pytest.mark.skip(reason="BPS_TEST_HCA names no device; see docs/rdma-testing.md"))
        elif item.get_closest_marker("vm") and not fabric.IN_VM:
            item.add_marker(pytest.mark.skip(reason="changes the kernel's interfaces: only inside the VM"))


@pytest.fixture
def cable() -> Iterator[fabric.Cable]:
    """Two devices with a cable between them, which can be disturbed."""
    with fabric.cables(1) as (made,):
        yield made


@pytest.fixture
def cables() -> Iterator[list[fabric.Cable]]:
    """Two of them: two rails for whoever is at one end of both."""
    with fabric.cables(2) as made:
        yield made


@pytest.fixture
def spare_device() -> Iterator[fabric.Device]:
    """A device that may be removed."""
    with fabric.spare_device() as made:
        yield made

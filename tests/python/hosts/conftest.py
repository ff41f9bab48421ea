# SPDX-License-Identifier: Apache-2.0
"""Hosts for `bps run -H`."""

from collections.abc import Iterator

import pytest
import ssh_hosts


@pytest.fixture(scope="session")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_hosts.Hosts]:
    """Made once for all tests."""
    if reason := ssh_hosts.why_not():
        pytest.skip(f"no hosts with sshd here: {reason}")
    with ssh_hosts.Hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def hosts(booted: ssh_hosts.Hosts) -> Iterator[ssh_hosts.Hosts]:
    """Three hosts with sshd, and a launcher; afterwards no process of a job may be left."""
    booted.restore()
    yield booted
    booted.clean()

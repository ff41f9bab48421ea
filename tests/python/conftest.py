# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests."""

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import harness
import pytest
from harness import network

import bps_rdma
from bps_rdma import cli


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what a launcher, or another test, has set."""
    clean = harness.clean_env()
    for name in set(os.environ) - set(clean):
        if not name.startswith("BPS_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def alone(clean_environment: None) -> Iterator[ModuleType]:
    """bps_rdma, initialised as a world of one in this process."""
    bps_rdma.init(timeout=60, heartbeat_timeout=20)
    yield bps_rdma
    bps_rdma.shutdown()


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Calls the main() of a command with arguments; gives its exit status, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str, main: Callable[[], None] = cli.main) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def networks() -> Iterator[network.Network]:
    """Two namespaces, for a rank each, that two networks join."""
    if reason := network.why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with network.Network(network.PAIR) as made:
        yield made

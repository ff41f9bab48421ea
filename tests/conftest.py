# SPDX-License-Identifier: Apache-2.0
"""What all suites have in common: over which transports a test runs, and which tests a landing leaves out."""

import os
import signal
import sys
from pathlib import Path

import harness
import hypothesis
import pytest

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("checks", deadline=None)
hypothesis.settings.load_profile("checks")
# pytest has put this folder on the path, and `import torch` would find the folder torch where there is no other.
sys.path[:] = [one for one in sys.path if Path(one) != Path(__file__).parent]

MOST_QUARANTINED = 10

# What runs under nohup, or in the background of a shell, ignores signals, and so would all that tests start.
for signum, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)


# What they assert is explained as in a test.
pytest.register_assert_rewrite("bodies", "reference")


def pytest_addoption(parser: pytest.Parser) -> None:
    """With `-m rdma --transport rdma` the tests of other suites that are marked so run over RDMA."""
    parser.addoption("--transport", action="append", help="what tests that take a transport run over: shm and tcp")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test whose library waits longer on a busy machine hangs later, too."""
    config.option.timeout = config.option.timeout or float(config.getini("timeout")) * harness.PATIENCE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a `transport` runs over each of those that are asked for."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "transport" in metafunc.fixturenames and not any("transport" in str(mark.args[0]) for mark in marks):
        mark = metafunc.definition.get_closest_marker("long_over")
        late = mark.args if mark else ()
        transports = metafunc.config.getoption("transport") or ["shm", "tcp"]
        forms = [pytest.param(one, marks=pytest.mark.long) if one in late else one for one in transports]
        metafunc.parametrize("transport", forms)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves long forms, and tests in quarantine, to `ci/test --all`, which sets BPS_TEST_ALL."""
    quarantined = {item: mark for item in items if (mark := item.get_closest_marker("quarantined"))}
    for item, mark in quarantined.items():
        if set(mark.kwargs) != {"reason", "seed", "tried"}:
            raise pytest.UsageError(f"{item.nodeid}: quarantined() says reason=, seed= and tried=")
    if len({item.function for item in quarantined if isinstance(item, pytest.Function)}) > MOST_QUARANTINED:
        raise pytest.UsageError(f"more than {MOST_QUARANTINED} tests are in quarantine")
    if os.environ.get("BPS_TEST_ALL"):
        return
    left_out = [item for item in items if item.get_closest_marker("long") or item in quarantined]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish() -> None:
    """What ci/test says of a step's processor time includes the ranks of tests, which are no children of pytest."""
    harness.end_forkserver()

# SPDX-License-Identifier: Apache-2.0
"""torchft over bps_rdma: two replicas train as on gloo, bit for bit; one is killed, and comes back."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import Command

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"step (\d+) of (\d+): .* weights (\w+)")


@contextlib.contextmanager
def lighthouse(replicas: int) -> Iterator[str]:
    """torchft's service, in this process; gives its address."""
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas, join_timeout_ms=1000)
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


class Replicas:
    """Replicas of examples/torchft/train.py; they end with the block."""

    def __init__(self, folder: Path, address: str, group: str, steps: int) -> None:
        self._folder, self._running = folder, []
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "PATH") if name in os.environ}
        self._env = harness.clean_env(
            **kept, OMP_NUM_THREADS="1", TORCHFT_LIGHTHOUSE=address, GROUP=group, STEPS=str(steps)
        )

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.end()

    def start(self, number: int) -> Command:
        """Another process of the replica with this number."""
        words = [sys.executable, str(ROOT / "examples" / "torchft" / "train.py")]
        log = self._folder / f"{len(self._running)}.log"
        self._running.append(Command(words, self._env | {"REPLICA": str(number)}, log, cwd="/"))
        return self._running[-1]


def steps_of(replica: Command, participants: int) -> dict[int, str]:
    """The weights after each step that it has made with so many."""
    found = LINE.findall(replica.output())
    return {int(step): weights for step, number, weights in found if int(number) == participants}


def test_weights_are_those_of_gloo(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for group in ("gloo", "bps"):
        folder = tmp_path / group
        folder.mkdir()
        with lighthouse(2) as address, Replicas(folder, address, group, steps=8) as replicas:
            both = [replicas.start(number) for number in range(2)]
            for one in both:
                harness.eventually(lambda one=one: len(steps_of(one, 2)) >= 8, 90)
            first, second = (steps_of(one, 2) for one in both)
        assert first == second
        found[group] = first
    assert found["bps"] == found["gloo"]
    assert len(set(found["bps"].values())) == 8


def test_a_replica_is_killed_and_comes_back(tmp_path: Path) -> None:
    with lighthouse(1) as address, Replicas(tmp_path, address, "bps", steps=100_000) as replicas:
        stays, goes = replicas.start(0), replicas.start(1)
        harness.eventually(lambda: steps_of(goes, 2), 90)
        goes.end()
        together = len(steps_of(stays, 2))
        harness.eventually(lambda: steps_of(stays, 1), 60)
        back = replicas.start(1)
        harness.eventually(lambda: len(steps_of(back, 2)) >= 3, 90)
        assert stays.status is None
        # It counts the step in which it came back as its first, so only weights can be compared.
        harness.eventually(lambda: set(steps_of(back, 2).values()) <= set(steps_of(stays, 2).values()), 60)
    assert len(steps_of(stays, 2)) > together


def test_the_page_names_the_version_that_was_tried() -> None:
    assert f"torchft {version('torchft')}" in (ROOT / "docs" / "frameworks.md").read_text()

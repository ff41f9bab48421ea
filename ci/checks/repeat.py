# SPDX-License-Identifier: Apache-2.0
"""Runs steps many times beside busy processes: what fails there now and then would stop a landing some day."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from checks.run import run_all
from checks.steps import Step

BUSY = 4  # processes of normal priority, on machines with two processors
# Until its parent has ended, which may have been killed.
LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    """Loops beside what runs meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def repeat(steps: Sequence[Step], times: int) -> int:
    """Returns the exit status. The seed of a run is its number, from 1."""
    bad: list[str] = []
    with busy_machine():
        for step in steps:
            for seed in range(1, times + 1):
                print(f"seed {seed}:", flush=True)
                logs = f"build/ci/repeat/{{}}-{seed}.log"
                (outcome,) = run_all([step], shown=False, logs=logs, BPS_TEST_SEED=str(seed))
                if outcome.failed:
                    bad.append(f"{step.name} with BPS_TEST_SEED={seed} ({outcome.note}); log: {outcome.log}")
    print("\n".join(f"FAILED: {one}" for one in bad))
    print(f"{len(steps) * times - len(bad)} passed, {len(bad)} failed")
    return 1 if bad else 0

# SPDX-License-Identifier: Apache-2.0
"""What becomes of a step that asks whether the machine can run it."""

from pathlib import Path

import harness
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("why_not", "status", "said", "closing"),
    [
        (1, 0, "the step runs\n", None),
        (0, 0, "lab: skipped, because this machine cannot: no namespaces\n", "the same"),
        (2, 1, "error: no namespaces\nhint: run ci/setup --dev\n", None),
    ],
    ids=["it can", "it cannot", "it lacks something"],
)
def test_a_step_runs_is_skipped_or_fails(tmp_path, why_not, status, said, closing):
    """COMMAND --why-not tells by its status."""
    command = tmp_path / "command"
    command.write_text(f'#!/bin/sh\n[ "$*" = --why-not ] && echo no namespaces\nexit {why_not}\n')
    command.chmod(0o755)
    step = 'set -euo pipefail; . ci/possible.sh; if_possible lab "$1" "$2"; echo the step runs'
    kept = tmp_path / "closing"
    done = harness.run_command(["bash", "-c", step, "step", str(kept), str(command)], cwd=ROOT)
    assert (done.returncode, done.stdout + done.stderr) == (status, said)
    assert (kept.read_text() if kept.exists() else None) == (said if closing else None)

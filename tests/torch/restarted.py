# SPDX-License-Identifier: Apache-2.0
"""A program of which one rank is lost and started again."""

from __future__ import annotations

from pathlib import Path

import harness


def ends_of(program: str, tmp_path: Path) -> list[list[str]]:
    """What three ranks print at the end, of which one kills itself once, and is started again."""
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [harness.binary("bps"), "run", "-np", "3", "--min-np", "2", "--restarts", "1", str(script)]
    env = harness.clean_env()
    words = [*command, str(tmp_path / "died")]
    ended = harness.run_command(words, env=env, within=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the job goes on with 2 ranks, and it is started again" in ended.stderr, ended.stderr
    assert "enters the job" in ended.stdout, ended.stdout
    ends = [line.split() for line in ended.stdout.splitlines() if line.startswith("end:")]
    assert len(ends) == 3, ended.stdout
    return ends

# SPDX-License-Identifier: Apache-2.0
"""Expensive steps that a landing runs only if what they are about has changed since they passed.

ci/checked says with which files they passed: a line with a step and a hash for each. `ci/test` writes it when such a
step passes. Commit it with a change of those files; a landing otherwise runs the step, which takes minutes.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from checks.steps import Step

CHECKED = Path("ci/checked")


def subject_hash(step: Step) -> str:
    """The hash of names and contents of the files that the step is about, as they are in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *step.subject],
        check=True, capture_output=True,
    ).stdout  # fmt: skip
    digest = hashlib.sha256()
    for name in sorted(filter(None, listed.decode().split("\0"))):
        if Path(name).is_file():  # a file may be deleted, and git not know yet
            digest.update(name.encode() + b"\0" + hashlib.sha256(Path(name).read_bytes()).digest())
    return digest.hexdigest()[:16]


def passed() -> dict[str, str]:
    """Of each step, the hash of the files with which it passed."""
    lines = CHECKED.read_text().splitlines() if CHECKED.exists() else []
    return dict(line.split() for line in lines if not line.startswith("#"))


def must_run(step: Step) -> bool:
    """Whether a landing runs this step of the level "all"; says why."""
    if not step.subject:
        return False
    is_new = passed().get(step.name) != subject_hash(step)
    why = "changed, so it runs" if is_new else "is as it was when it passed, so it does not run"
    print(f"{step.name}: its subject ({' '.join(step.subject)}) {why}", flush=True)
    return is_new


def hashes(steps: Iterable[Step]) -> dict[str, str]:
    """Of those that have a subject, the hash of its files as they are now."""
    return {step.name: subject_hash(step) for step in steps if step.subject}


def record(new: Mapping[str, str]) -> None:
    """Notes with which files steps have passed."""
    if not new:
        return
    text = "# The files with which these steps of `ci/test --all` passed: see ci/checks/subjects.py.\n"
    text += "".join(f"{name} {value}\n" for name, value in sorted((passed() | new).items()))
    CHECKED.write_text(text)

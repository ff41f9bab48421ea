# SPDX-License-Identifier: Apache-2.0
"""Finds in the log of a step which of its tests failed and why: a reader may see only a part of that log."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST = 40  # lines of a step
LAST = 10  # of them, where none looks like a complaint

# Of googletest, pytest, the sanitizers, compilers, codespell and our own scripts.
GTEST = re.compile(r"^\[  FAILED  \] \S+(, where .*)? \(\d+ ms\)$")
ONE_LINE = re.compile(
    r"^(E   |FAILED |ERROR |.*(ERROR: \w+Sanitizer|SUMMARY: \w+Sanitizer|runtime error:)|(.*: )?(fatal )?error:)"
    r"|.*LeakSanitizer has encountered a fatal error"  # it crashed itself, and found no leak
    r"|^\d+/\d+ Test .*\*\*\*"
    r"|^\S+:\d+: \S+ ==> "
)
CTEST = re.compile(r"^( *Start +\d+: |\d+/\d+ Test +#\d+: |\d+% tests passed)")
ASSERTION = re.compile(r"^\S+:\d+: Failure$")
SAID = 4  # lines that an assertion of googletest says after its place


def complaints(log: Iterable[str]) -> list[str]:
    """The lines that say what failed, in order, each once; not more than MOST. Or the last ones, if none seems to."""
    found: dict[str, None] = {}
    left = 0
    running = ""
    said = [line for text in log if (line := text.rstrip())]
    for line in said:
        if line.startswith("[ RUN "):
            running = line
        elif line.startswith(("[  ", "[==")):
            running = ""
        elif running and CTEST.match(line):
            found[f"{running}, and no end of it"] = None
            running = ""
        if ASSERTION.match(line):
            left = SAID + 1
        if line.startswith("["):
            left = 0
        if left > 0 or GTEST.match(line) or ONE_LINE.match(line):
            found[line] = None
        left = max(left - 1, 0)
    lines = list(found) or said[-LAST:]
    more = len(lines) - MOST
    return [*lines[:MOST], f"... and {more} lines like these"] if more > 0 else lines

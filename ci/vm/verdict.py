#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads what ci/vm/tests left in a folder, and says in one line what ran; fails if that is not what should have run.

A crash of the guest, a filter that matches nothing, or tests that quietly skip themselves must not look like success.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cases(report: Path) -> list[tuple[str, str, str]]:
    """(name, passed | failed | skipped, reason) of each test of a JUnit report."""
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 (our own file)
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found.append((name, "failed", ""))
        elif skipped is not None:
            found.append((name, "skipped", (skipped.get("message") or "").strip()))
        elif case.get("status", "run") == "run":  # gtest lists disabled tests as "notrun"
            found.append((name, "passed", ""))
    return found


def main(folder: Path) -> str:
    """Returns the closing line; raises SystemExit otherwise."""
    ran: list[tuple[str, str, str]] = []
    checked = (folder / "memcheck").exists()
    needed = set() if checked else {"junit.xml"}
    if any((ROOT / "csrc/transport/rdma").glob("*.cc")):
        needed.add("gtest.xml")
    for name in ("gtest.xml", "junit.xml"):
        report = folder / name
        suite = cases(report) if report.exists() else []
        if name in needed and not any(state == "passed" for _, state, _ in suite):
            sys.exit(f"error: of the suite in {report} no test passed")
        ran += suite
    for name, state, reason in ran:
        if state == "failed":
            sys.exit(f"error: {name} failed")
        if state == "skipped":
            if reason in ("", "unconditional skip"):
                sys.exit(f"error: {name} was skipped without a reason")
            print(f"skipped: {name}: {reason}")
    passed = sum(state == "passed" for _, state, _ in ran)
    skipped = sum(state == "skipped" for _, state, _ in ran)
    kernel = (folder / "kernel").read_text().strip()
    line = f"{passed} passed" + (f", {skipped} skipped" if skipped else "")
    if checked:
        if "ERROR SUMMARY: 0 errors" not in (folder / "memcheck").read_text():
            sys.exit(f"error: valgrind found errors, or did not end; see {folder / 'memcheck'}")
        return f"{line}, no access to memory that is not the program's, kernel {kernel}"
    passed_in = re.findall(r"^chaos: .* (\d+) trials, 0 violated", (folder / "chaos").read_text(), re.MULTILINE)
    if len(passed_in) != 2 or "0" in passed_in:  # jobs that a loss ends, and jobs that go on
        sys.exit(f"error: not all trials of the chaos campaigns passed; see {folder / 'chaos'}")
    return f"{line}, {sum(map(int, passed_in))} chaos trials, kernel {kernel}"


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))

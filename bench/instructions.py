# SPDX-License-Identifier: Apache-2.0
"""Counts instructions per partition, message and queue operation with callgrind, and compares with instructions.json.

    python bench/instructions.py build/ci/release/bench/path_bench             # fails if a case takes 10 % more
    python bench/instructions.py build/ci/release/bench/path_bench --write     # stores the new counts

Counts are repeatable where times are not. They depend on the compiler: counts of another compiler are shown, but not
compared. Each count is the difference of two runs of different length, so that start-up and end do not count.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

FIGURES = Path(__file__).with_name("instructions.json")
TIMES = 4096  # a multiple of the partitions of one operation
TOLERANCE = 0.10
CASES = {
    "operation": "push_pull of one partition by 2 workers: start, push, sum, answer, end",
    "partition": "partition of a large tensor of 2 workers: push, sum, answer",
    "posting": "posting through a ring in shared memory",
    "credits": "control message with 8 landing slots, encoded and decoded",
    "queue": "operation into and out of a send queue of 1,000 operations",
}


def collected(program: str, case: str, times: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, case, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or found is None:
        sys.exit(f"error: {' '.join(command)}:\n{done.stderr}")
    return int(found[1])


def measure(program: str, case: str) -> float:
    return (collected(program, case, 2 * TIMES) - collected(program, case, TIMES)) / TIMES


def compiler(program: str) -> str:
    """The compiler in the program's comment section, such as "GCC 12" or "clang 14"."""
    said = subprocess.run(["readelf", "-p", ".comment", program], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(clang) version (\d+)|(GCC): \([^)]*\) (\d+)", said)
    return " ".join(word for word in found.groups() if word) if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {"compiler": "", "instructions": {}}
    built_by = compiler(args.program)
    found = {case: round(measure(args.program, case)) for case in CASES}
    dearer = []
    for case, what in CASES.items():
        before = known["instructions"].get(case)
        change = f"{found[case] / before - 1:+.1%}" if before else "new"
        print(f"{found[case]:7,d}  {change:>7}  {what}")
        if before is None or found[case] > before * (1 + TOLERANCE):
            dearer.append(case)
    if args.write:
        FIGURES.write_text(json.dumps({"compiler": built_by, "instructions": found}, indent=2) + "\n")
    elif built_by != known["compiler"]:
        print(f"built by {built_by}, but the stored counts are for {known['compiler']}: not compared")
    elif dearer:
        sys.exit(
            f"error: more than {TOLERANCE:.0%} more instructions: {', '.join(dearer)}\n"
            "hint: find out why; if the change is worth it, run again with --write and give the reason in the commit"
        )


if __name__ == "__main__":
    main()

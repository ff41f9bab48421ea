# SPDX-License-Identifier: Apache-2.0
"""Searches all states of the models in this folder by spin, and shows that it would find the defects planted in them.

    python tests/model/check.py [--closing FILE] [--only rounds] [--keep FOLDER]

A configuration holds if every state has been visited and none violates an assertion or is stuck. docs/model.md explains
the models, and how to read the trail of a violation.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 300  # of one search
MEGABYTES = 4096


@dataclass(frozen=True)
class Case:
    """One search: a model, its sizes, and the defect that is planted in it, if one is."""

    model: str
    sizes: str = ""
    defect: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.model, self.sizes, self.defect]))

    @property
    def defines(self) -> list[str]:
        """The arguments of spin."""
        return [f"-D{one}" for one in [*self.sizes.split(), self.defect] if one]


CASES = [
    Case("rounds", "DEADLINES=0"),
    Case("rounds", "DEADLINES=1"),
    Case("rounds", "DEADLINES=2"),
    Case("failover", "PARTS=2"),
    Case("failover", "ROUNDS=2"),
    Case("failover", "PARTS=2 ROUNDS=2"),
    Case("failover", "PARTS=2 PIECES"),
    Case("failover", "PARTS=2 ROUNDS=2 SHARDED"),
    Case("failover", "SERVERS=3 CRASHES=2 ROUNDS=2"),
    Case("fencing", "FAULTS=0 DEADLINES=0"),
    Case("fencing", "FAULTS=1"),
    Case("fencing", "FAULTS=0 MISTAKES=1"),
    Case("fencing", "DIRECT=0 FAULTS=1"),
    Case("fencing", "DIRECT=0 FAULTS=0 MISTAKES=1"),
    Case("scheduler", "DEATHS=0"),
    Case("scheduler", "DEATHS=1"),
    Case("scheduler", "DEATHS=2"),
    Case("shift", "SHIFTS=1 ROUNDS=3"),
    Case("shift", "SHIFTS=2"),
    Case("rounds", "DEADLINES=1", "BUG_RETURNS_BEFORE_ACKNOWLEDGED"),
    Case("rounds", "DEADLINES=1", "BUG_SLOT_RELEASED_TWICE"),
    Case("rounds", "DEADLINES=1", "BUG_ONE_CONTRIBUTION_LESS"),
    Case("rounds", "DEADLINES=1", "BUG_NO_TOMBSTONE"),
    Case("rounds", "DEADLINES=0", "BUG_NO_OVERFLOW"),
    Case("failover", "PARTS=2", "BUG_STALE_ACCEPTED"),
    Case("failover", "PARTS=2", "BUG_ONE_CONTRIBUTION_LESS"),
    Case("failover", "PARTS=2", "BUG_COMMITS_EARLY"),
    Case("failover", "PARTS=2", "BUG_ONE_PHASE"),
    Case("failover", "", "BUG_GIVES_NOTHING"),
    Case("failover", "PIECES", "BUG_GIVES_NOTHING"),
    Case("failover", "SERVERS=3 CRASHES=2", "BUG_DOES_NOT_WAIT"),
    Case("failover", "PARTS=2 SHARDED", "BUG_MISSES_UNWANTED"),
    Case("fencing", "FAULTS=1", "BUG_NO_FENCE"),
    Case("fencing", "FAULTS=0", "BUG_RETURNS_BEFORE_ACKNOWLEDGED"),
    Case("fencing", "DIRECT=0 FAULTS=1", "BUG_NOT_CLOSED"),
    Case("scheduler", "DEATHS=1", "BUG_OWES_NOTHING"),
    Case("scheduler", "DEATHS=1", "BUG_VIEW_ENDS_BEFORE_ANSWERS"),
    Case("shift", "SHIFTS=1", "BUG_READS_FIRST"),
    Case("shift", "SHIFTS=1", "BUG_LOOKS_FIRST"),
    Case("shift", "SHIFTS=1", "BUG_EARLIEST"),
    Case("shift", "SHIFTS=2", "BUG_NOT_THROUGH"),
]


def run(words: list[str], folder: Path, timeout: float = SECONDS) -> str:
    """The output of a command that must not fail."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(words)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def search(case: Case, folder: Path) -> tuple[int, int]:
    """(errors, states) of a complete search. Ends the program if the search was not complete."""
    for name in (f"{case.model}.pml", "trace.pml"):
        shutil.copy(HERE / name, folder)
    run(["spin", "-a", *case.defines, f"{case.model}.pml"], folder)
    run(["gcc", "-w", "-O2", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}", "-o", "pan", "pan.c"], folder)
    output = run(["./pan", "-m1000000", "-n"], folder)
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, stored", output)
    cut_short = re.search(r"out of memory|max search depth too small|Search not completed|interrupted", output)
    if errors is None or states is None or (cut_short and errors[1] == "0"):
        sys.exit(f"error: {case}: the search was not complete\n{output}")
    # An error of another kind, such as a channel that is too short for a d_step, says that the model is wrong.
    reason = re.search(r"^pan:1: (assertion violated|invalid end state)", output, re.MULTILINE)
    if errors[1] != "0" and reason is None:
        sys.exit(f"error: {case}: neither an assertion nor a deadlock\n{output}")
    return int(errors[1]), int(states[1])


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--closing", type=Path, help="file for the closing line")
    parser.add_argument("--only", help="the cases with this in their names")
    parser.add_argument("--keep", type=Path, help="folder for what spin has made, with the trails of violations")
    options = parser.parse_args()
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(tool) is None:
            sys.exit(f"error: {tool} is not installed\nhint: apt-get install {package}, or ci/setup --dev")
    chosen = [case for case in CASES if (options.only or "") in str(case)]
    wrong, total = [], 0
    for number, case in enumerate(chosen):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            if options.keep:
                folder = options.keep / f"{number} {case}".replace(" ", "-").replace("=", "")
                folder.mkdir(parents=True)
            begin = time.monotonic()
            errors, states = search(case, folder)
        is_right = (errors > 0) == bool(case.defect)
        wrong += [] if is_right else [str(case)]
        total += 0 if case.defect else states
        verdict = "violated" if errors else "holds"
        print(
            f"{case}: {verdict}{'' if is_right else ' (WRONG)'}, {states} states, {time.monotonic() - begin:.1f} s",
            flush=True,
        )
    if wrong or not chosen:
        sys.exit(f"error: not as expected: {', '.join(wrong) or 'no such case'}; --keep FOLDER keeps the trails")
    defects = sum(bool(case.defect) for case in chosen)
    closing = (
        f"model: {len(chosen) - defects} configurations hold in {total} states, {defects} planted defects were found"
    )
    print(closing)
    if options.closing:
        options.closing.write_text(closing + "\n")


if __name__ == "__main__":
    main()

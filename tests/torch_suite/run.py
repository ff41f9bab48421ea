# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own suite for torch.distributed on the backend bps, and compares with gloo and with expected.txt.

    .venv/bin/python tests/torch_suite/run.py [file for the closing line]
    .venv/bin/python tests/torch_suite/run.py --write-gloo    # measures gloo, and writes what came of it to gloo.txt

Two runs: as bps, and as gloo with 4 ranks. With BPS_TEST_ALL set (`ci/test --all`) as gloo with 2 and 3 ranks as well,
and gloo itself, which must still be what gloo.txt says. Then autograd.py, as gloo.

Fails if a test fails, if a test is skipped that gloo passes and expected.txt does not name, or if nothing ran.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).parent
ALL = bool(os.environ.get("BPS_TEST_ALL"))
RUNS = [("bps", 2), ("bps-as-gloo", 4)]
if ALL:
    RUNS = [("gloo", 2), *RUNS, ("bps-as-gloo", 2), ("bps-as-gloo", 3)]
GLOO = HERE / "gloo.txt"
AUTOGRAD_TESTS = 11
PASSED = ""
FAILED = "failed"
RUN_ITSELF = "the run itself"
# Skips whose cause is the same for every backend and number of ranks: no need to start processes for them again.
FOR_GOOD = ("CUDA", "cuda", "Nccl", "NCCL", "github.com/pytorch", "torchvision", "nccl'}")

Outcomes = dict[str, str]  # test -> PASSED, FAILED or why it was skipped


def run(mode: str, world: int, leave: list[str], file: str = "suite.py") -> Outcomes:
    """One run of a suite, without the tests `leave`."""
    with tempfile.TemporaryDirectory(prefix="bps-suite-") as folder:
        report = Path(folder) / "report.xml"
        env = os.environ | {
            "BPS_SUITE": mode,
            "BPS_SUITE_LEAVE": ",".join(leave),
            "WORLD_SIZE": str(world),
            "TEMP_DIR": folder,
            "OMP_NUM_THREADS": "1",
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        }
        command = [
            str(Path(sys.executable).parent / "pytest"), "-q", "--tb=short", "--timeout=200", "-p", "no:cacheprovider",
            "-c", os.devnull, "--rootdir", str(HERE), f"--junitxml={report}", "-W", "ignore", "-rf",
            str(HERE / file),
        ]  # fmt: skip
        begin = time.monotonic()
        ran = subprocess.run(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        print(
            f"{file}: {mode}, {world} ranks, {time.monotonic() - begin:.0f} s: {ran.stdout.decode().splitlines()[-1]}",
            flush=True,
        )
        outcomes = read(report) if report.exists() else {}
        if ran.returncode != 0 or not outcomes:
            print(ran.stdout.decode(errors="replace"), flush=True)
            outcomes.setdefault(RUN_ITSELF, FAILED)
        return outcomes


def read(report: Path) -> Outcomes:
    outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        broken = case.find("failure") is not None or case.find("error") is not None
        outcomes[case.get("name", "?")] = (
            FAILED if broken else PASSED if skipped is None else skipped.get("message", "?")
        )
    return outcomes


def expected() -> tuple[dict[tuple[str, int], int], dict[str, str]]:
    """(passes per mode and ranks, reason per beginning of a skip's message)."""
    passes, reasons = {}, {}
    for line in (HERE / "expected.txt").read_text().splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "passes":
            mode, world, count = rest.split()
            passes[mode, int(world)] = int(count)
        elif kind == "skip":
            message, _, reason = rest.partition(" | ")
            reasons[message] = reason
    return passes, reasons


def write_gloo() -> None:
    lines = ["# What gloo makes of each test with 2 ranks; written by run.py --write-gloo."]
    lines += [
        f"{name} | {why.splitlines()[0] if why else 'passed'}" for name, why in sorted(run("gloo", 2, []).items())
    ]
    GLOO.write_text("\n".join(lines) + "\n")


def read_gloo() -> Outcomes:
    lines = [line.split(" | ", 1) for line in GLOO.read_text().splitlines() if not line.startswith("#")]
    return {name: PASSED if why == "passed" else why for name, why in lines}


def main() -> int:
    passes, reasons = expected()
    complaints: list[str] = []
    counts: dict[tuple[str, int], int] = {}
    gloo = read_gloo()
    for mode, world in RUNS:
        leave = [name for name, why in gloo.items() if any(word in why for word in FOR_GOOD)]
        outcomes = run(mode, world, leave)
        passed = {name for name, why in outcomes.items() if why == PASSED}
        counts[mode, world] = len(passed)
        where = f"{mode}, {world} ranks"
        if mode == "gloo":
            known = {name for name, why in gloo.items() if why == PASSED}
            complaints += [f"{where}: {name}: gloo.txt says otherwise" for name in sorted(passed ^ known)]
        complaints += [f"{where}: {name} failed" for name, why in outcomes.items() if why == FAILED]
        for name, why in outcomes.items():
            if world != 2 or why in (PASSED, FAILED) or gloo.get(name, PASSED) != PASSED:
                continue
            reason = next((text for message, text in reasons.items() if why.startswith(message)), None)
            if mode == "bps" and reason is not None:
                print(f"  skipped, but passes on gloo: {name}: {why} ({reason})")
            else:
                complaints.append(f"{where}: {name} is skipped, but passes on gloo: {why}")
        wanted = passes.get((mode, world), passes["gloo", world])
        if len(passed) < wanted:
            complaints.append(f"{where}: {len(passed)} tests passed, not {wanted}")
    autograd = run("bps-as-gloo", 6, [], "autograd.py")
    complaints += [f"autograd.py: {name}: {why or 'passed'}" for name, why in autograd.items() if why != PASSED]
    if len(autograd) != AUTOGRAD_TESTS:
        complaints.append(f"autograd.py: {len(autograd)} tests ran, not {AUTOGRAD_TESTS}")
    for complaint in complaints:
        print(f"error: {complaint}")
    presented = [f"{counts[mode, world]} with {world} ranks" for mode, world in RUNS if mode == "bps-as-gloo"]
    line = (
        f"torch's suite: {counts['bps', 2]} passed under the name bps; presented as gloo {', '.join(presented)} "
        f"(gloo: {passes['gloo', 2]}/{passes['gloo', 3]}/{passes['gloo', 4]} with 2/3/4); "
        f"{len(autograd)} under distributed autograd and beside RPC"
    )
    print(line)
    if not complaints and len(sys.argv) > 1:
        with Path(sys.argv[1]).open("a") as closing:
            print(line, file=closing)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(write_gloo() if sys.argv[1:] == ["--write-gloo"] else main())

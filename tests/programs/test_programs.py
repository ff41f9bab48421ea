# SPDX-License-Identifier: Apache-2.0
"""Every program under bench/, every example and every command of the package runs, in a short form, and measures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ELSEWHERE, NOT_HERE, OF_PAGES, RUNS, Run

ROOT = Path(__file__).parents[2]
LIMIT_S = 600 * int(os.environ.get("BPS_TEST_PATIENCE", "1"))
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


EVERY = [*(one for runs in RUNS.values() for one in runs), *OF_PAGES]


def programs() -> set[str]:
    """All of them: files, and the commands that pip installs."""
    text = (ROOT / "pyproject.toml").read_text()
    commands = re.search(r"\[project\.scripts\]\n(.*?)\n\n", text, re.DOTALL)
    assert commands
    patterns = ["bench/*.py", "bench/*_bench.cc", "bps_rdma/tools/**/__main__.py"]
    patterns += [f"examples/**/*.{suffix}" for suffix in ("py", "sh", "sbatch")]
    files = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    return files | {line.partition(" ")[0] for line in commands[1].splitlines()}


def run(command: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Runs it as a user with an active environment does; at its limit it ends with all that it has started."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("BPS_", "BYTEPS_", "DMLC_"))}
    env |= {name: value for name, value in os.environ.items() if name.startswith("BPS_VM_")}
    env |= {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
        "COLUMNS": "200", "OUT": str(out), "BUILD": "build/ci/release/bench",
    }  # fmt: skip
    words = ["timeout", "--kill-after", "10", str(LIMIT_S), "bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_every_program_is_run_somewhere():
    assert sorted(programs()) == sorted([*RUNS, *NOT_HERE, *ELSEWHERE]), "see the first lines of programs.py"


@pytest.mark.parametrize(("program", "where"), ELSEWHERE.items())
def test_what_runs_it_names_it(program, where):
    path = Path(program)
    name = ".".join(path.parts[:-1]) if path.name == "__main__.py" else path.stem
    assert re.search(rf"\b{re.escape(name)}\b", (ROOT / where).read_text())


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in EVERY])
def test_it_measures(one: Run, tmp_path):
    if one.root and os.geteuid() != 0:
        pytest.skip("it makes namespaces, and only root may")
    done = run(one.command, tmp_path)
    said = f"{one.command}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    assert re.search(one.shows, done.stdout, re.MULTILINE), said


@pytest.mark.parametrize(("program", "reason"), NOT_HERE.items())
def test_what_cannot_run_here_starts(program, reason, tmp_path):
    text = (ROOT / program).read_text()
    compile(text, program, "exec")
    if "argparse" in text:
        done = run(f"python {program} --help", tmp_path)
        assert done.returncode == 0, f"{reason}\n{done.stderr}"
        assert "usage:" in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Command lines that no test of tests/docs runs: their programs are run elsewhere, and know the options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ELSEWHERE, NOT_HERE, RUNS

ROOT = Path(__file__).parents[2]
KNOWN = {*RUNS, *NOT_HERE, *ELSEWHERE}
# A program of ours with its options, as it stands on a line of a page or of a program's own first lines.
LINE = re.compile(
    r"(?:\b(?P<file>(?:bench|examples)/[\w/]+\.(?:py|sh|sbatch))|(?<![\w/.-])(?P<command>(?:pushpull|allreduce|ddp)_bench)\b)"
    r"(?P<words>(?: +(?:\\\n +)?(?!#)[^\s`|()]+)*)"
)
PATTERNS = ("*.md", "docs/*.md", "examples/**/*.md", "bench/*.py", "examples/**/*.py")
SOURCES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.name != "CHANGELOG.md")
# They pass their options on; tests/megatron_suite and tests/slurm run the lines of the pages.
PASSES_ON = {"bench/on_links.py", "examples/megatron/on_cpu.py", "examples/slurm/ranks.sbatch"}


def lines_of(path: Path) -> list[re.Match[str]]:
    """The command lines in a page, or in the docstring at the top of a program."""
    text = path.read_text()
    if path.suffix == ".py":
        docstring = re.search(r'"""(.*?)"""', text, re.DOTALL)
        text = docstring[1] if docstring else ""
    return list(LINE.finditer(text))


FOUND = {
    (found["file"] or found["command"], option)
    for path in SOURCES
    for found in lines_of(path)
    for option in ["", *re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", found["words"])]
}
WITH_OPTIONS = sorted({program for program, option in FOUND if option and program in KNOWN - PASSES_ON})


def test_there_are_command_lines():
    assert len({program for program, _ in FOUND}) > 25
    assert len(WITH_OPTIONS) > 10


def test_every_program_on_a_page_is_one_that_is_run():
    assert sorted({program for program, _ in FOUND} - KNOWN) == []


@pytest.mark.parametrize("program", WITH_OPTIONS)
def test_it_knows_the_options_that_a_page_gives_it(program):
    options = sorted(option for name, option in FOUND if name == program and option)
    path = ROOT / program
    if path.is_file():
        # Where its options are declared, some by a loop over their names; examples share theirs.
        patterns = [program] if program.startswith("bench/") else ["examples/**/*.py", "bps_rdma/megatron/*.py"]
        text = "".join(file.read_text() for pattern in patterns for file in ROOT.glob(pattern))
        known = {"--help", *(f"--{name}" for name in re.findall(r'"(?:--)?([a-z][\w-]*)"', text))}
    else:
        command = Path(sys.executable).with_name(program)
        shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True, cwd="/").stdout
        known = set(re.findall(r"--[a-z][\w-]*", shown))
    assert set(options) <= known

# SPDX-License-Identifier: Apache-2.0
"""Names in the documentation are those of the program: settings, options of commands, exceptions, public names."""

import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks_of, tokens_of

import bps_rdma
from bps_rdma import errors

COMMANDS = ("pushpull_bench", "allreduce_bench", "ddp_bench", "bps-server", "bps-scheduler", "bps run", "bps bench",
  "bps allreduce", "bps ddp-bench", "bps doctor", "bps config", "bps version", "bps env", "bps trace merge",
  "bps trace summary", "bps tune", "bps why", "bps top", "bps dump")  # fmt: skip
# Not settings, and true all the same: of tests and tools of this repository, and of BytePS where a page says that
# there is nothing of the kind here.
OTHER = re.compile(r"BPS_(TEST|VM)_\w+|BPS_(SANITIZE|TESTS|BENCH|PYTHON|RDMA|VM)")


@functools.cache
def help_of(command: str) -> str:
    program, *arguments = command.split()
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    path = Path(sys.executable).with_name(program)
    return subprocess.run([path, *arguments, "--help"], env=env, capture_output=True, text=True, check=True).stdout


def command_lines(page: Path) -> list[str]:
    """Whatever in a page is a command line: lines of shell, and code in its text."""
    lines = [
        line
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").split("\n")
    ]
    for token in tokens_of(page):
        lines += [child.content for child in token.children or () if child.type == "code_inline"]
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page):
    for line in command_lines(page):
        for command in COMMANDS:
            if not re.search(rf"(^|[\s/]){re.escape(command)}\s", line):
                continue
            rest = re.split(rf"(?:^|[\s/]){re.escape(command)}\s", line, maxsplit=1)[1]
            for word in shlex.split(rest, comments=True):
                if word in ("|", "||", "&&", ";", "&", ">", "2>"):
                    break  # what follows is another command's
                if command == "bps run" and re.search(r"\.py$|^(-m|\./\S+|python\S*|COMMAND)$", word):
                    break  # what follows belongs to the program
                if re.match(r"--?[a-z]", word):
                    option = word.split("=")[0]
                    assert re.search(rf"(^|[\s,]){re.escape(option)}\b", help_of(command)), f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page):
    known = {setting.name for setting in bps_rdma.config()}
    for name in set(re.findall(r"\bBPS_[A-Z][A-Z_]*[A-Z]\b", page.read_text())):
        assert name in known or OTHER.fullmatch(name), f"{page.name}: {name} is no setting"


def test_the_table_of_metrics_is_complete():
    paths = [path for path in (ROOT / "csrc").rglob("*.cc") if path.name != "trace_json.cc"]  # names of events
    sources = "".join(path.read_text() for path in paths)
    served = set(re.findall(r'"((?:bps|process)_[a-z0-9_]+)"', sources))
    rows = re.findall(r"^\| (`(?:bps|process)_[^|]*)\|", (ROOT / "docs/observability.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == served


def test_the_table_of_exceptions_is_complete():
    text = (ROOT / "docs/errors.md").read_text()
    rows = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? *\|", text, re.MULTILINE)}
    classes = {name: one for name, one in vars(errors).items() if inspect.isclass(one) and one is not errors.BpsError}
    assert set(rows) == set(classes)
    for name, base in rows.items():
        bases = {one.__name__ for one in classes[name].__mro__}
        assert not base or base in bases, f"{name} is no {base}"


def test_defaults_that_pages_state_are_those_of_the_settings():
    """`BPS_NAME` (value) in a page for those who come from elsewhere."""
    text = (ROOT / "docs/coming-from.md").read_text()
    defaults = {setting.name: setting.default for setting in bps_rdma.config()}
    stated = dict(re.findall(r"`(BPS_[A-Z_]+)(?:=\w+)?` \(`?([0-9A-Z]+)`?[ )]", text))
    assert len(stated) >= 3
    assert stated == {name: defaults[name] for name in stated}
    chosen = pytest.importorskip("bps_rdma.torch.bucket_sizes").bucket_sizes(1 << 30, on_device=False)
    assert text.count(f"`bucket_mb` ({chosen.others / (1 << 20):g} for all but small models") == 2

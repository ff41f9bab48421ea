# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/start.md for several machines print what the page says."""

import re
import shlex
from pathlib import Path

import pytest
from ssh_hosts import Hosts

ROOT = Path(__file__).parents[3]


@pytest.mark.long  # imports torch on every rank
def test_the_commands_of_the_page(hosts: Hosts):
    pytest.importorskip("torch")
    page = (ROOT / "docs/start.md").read_text()
    section = page[page.index("test_documented_hosts.py runs it") :]
    commands, shown = re.findall(r"```(?:sh|text)\n(.*?)```", section, re.DOTALL)[:2]
    printed = []
    for command in commands.splitlines():
        name, *words = shlex.split(command)
        assert name == "bps"
        status, said = hosts.ended(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"})
        assert status == 0, said
        printed += said.splitlines()
    lines = shown.splitlines()
    assert len(lines) == len(printed), printed
    for line, said in zip(lines, printed, strict=True):
        assert _without_numbers(line) == _without_numbers(said), printed


def _without_numbers(line: str) -> str:
    return re.sub(r"[0-9.]+", "0", line)

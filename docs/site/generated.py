# SPDX-License-Identifier: Apache-2.0
"""Directives whose content comes from the program itself: the commands' --help, and the counters.

```{command} bps run
```

```{counters}
```
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

ROOT = Path(__file__).parent.parent.parent
COUNTER = re.compile(r"^  Counter (?P<name>\w+);(?:\s*// (?P<meaning>.*))?$")


class Command(Directive):
    """What the command prints with --help, at 80 columns."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Called by Sphinx."""
        program, *arguments = self.arguments[0].split()
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("BPS_", "BYTEPS_", "DMLC_"))}
        done = subprocess.run(
            [Path(sys.executable).with_name(program), *arguments, "--help"],
            env=keep | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise self.error(f"{self.arguments[0]} --help failed: {done.stderr}")
        text = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
        return [nodes.literal_block(text, text, language="text")]


def read_counters(header: str) -> dict[str, dict[str, str]]:
    """The counters of csrc/core/metrics.h and their meanings, by the part of the program that counts them."""
    parts: dict[str, dict[str, str]] = {}
    inside = header.partition("struct Counters {")[2].partition("std::vector")[0]
    part = last = ""
    for line in inside.splitlines():
        if heading := re.fullmatch(r"  // (\w+)", line):
            part = heading[1]
        elif counter := COUNTER.match(line):
            name, meaning = counter["name"], counter["meaning"]
            if meaning is None and not name.endswith("_bytes"):
                raise ValueError(f"csrc/core/metrics.h does not say what {name} counts")
            parts.setdefault(part, {})[name] = meaning or f"bytes of those that `{last}` counts"
            last = name
    return parts


class Counters(Directive):
    """A table of what bps_rdma.metrics() counts."""

    def run(self) -> list[nodes.Node]:
        """Called by Sphinx."""
        lines = ["| counted by | counter | meaning |", "|---|---|---|"]
        for part, counters in read_counters((ROOT / "csrc/core/metrics.h").read_text()).items():
            lines += [f"| {part.lower()} | `{name}` | {meaning} |" for name, meaning in counters.items()]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, "csrc/core/metrics.h"), self.content_offset, node)
        return node.children


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command", Command)
    app.add_directive("counters", Counters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

# SPDX-License-Identifier: Apache-2.0
"""Directives whose content comes from the program itself: what a command prints with --help, and docstrings.

```{command} bps run
```

```{reference} bps_rdma
push_pull Handle+
```
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList


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


class Reference(Directive):
    """The docstrings of functions, classes and errors of a module; with a + also those of a class's members."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Called by Sphinx."""
        lines = [f".. currentmodule:: {self.arguments[0]}", ""]
        for word in " ".join(self.content).split():
            name = word.removesuffix("+")
            found = getattr(importlib.import_module(self.arguments[0]), name)
            kind = "function"
            if isinstance(found, type):
                kind = "exception" if issubclass(found, BaseException) else "class"
            lines += [f".. auto{kind}:: {name}", *["   :members:"] * (name != word), ""]
        whole = nodes.Element()
        self.state.nested_parse(StringList(["```{eval-rst}", *lines, "```"]), self.content_offset, whole)
        return whole.children


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command", Command)
    app.add_directive("reference", Reference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

# SPDX-License-Identifier: Apache-2.0
"""A directive whose content comes from the program itself: what a command prints with --help.

```{command} bps run
```
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive


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


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

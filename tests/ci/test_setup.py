# SPDX-License-Identifier: Apache-2.0
"""ci/setup, where something is missing: who cannot install packages is told which, and what is compiled is shown."""

import os
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "ci" / "setup"
pytestmark = pytest.mark.skipif(not SETUP.exists(), reason="not in a checkout")


def stubs(folder: Path, **scripts: str) -> str:
    """PATH with these programs before all others."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("options", [[], ["--dev"]])
def test_without_root_the_packages_are_listed(options, tmp_path):
    path = stubs(tmp_path, id="echo 1000", sudo="exit 1", **{"dpkg-query": "exit 1", "apt-get": "exit 1"})
    done = subprocess.run(
        [SETUP, *options], env={**os.environ, "PATH": path, "CXX": "/nowhere/c++"}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "as root, apt-get update && apt-get install g++ cmake" in done.stderr
    assert ("valgrind" in done.stderr) == bool(options)
    assert ("error: without a C++20 compiler" in done.stderr) == (not options)


def test_progress_is_shown_by_the_tenth():
    lines = "pip\n" + "".join(f"  [{i}/30] Building CXX object a.o\n" for i in range(1, 31))
    function = SETUP.read_text(encoding="utf-8").split("show_progress() {")[1].split("\n}\n")[0]
    done = subprocess.run(
        ["bash", "-euc", f"show_progress() {{{function}\n}}\nshow_progress"], input=lines, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    shown = done.stdout.splitlines()
    assert shown[-1] == "compiled 30 of 30 files"
    assert 8 <= len(shown) <= 12

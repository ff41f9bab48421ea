# SPDX-License-Identifier: Apache-2.0
"""The entry point by which torch finds the backend: it registers it, and a broken package costs a warning only."""

import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest

import bps_rdma

ROOT = Path(__file__).parents[2]

# What torch does with an entry point: it loads it by its name, and calls it.
LOAD = """
import importlib, sys, torch
module, _, name = sys.argv[1].partition(":")
getattr(importlib.import_module(module), name)()
print("bps" in torch.distributed.Backend.backend_list)
"""


def load(path: str) -> subprocess.CompletedProcess[str]:
    settings = (ROOT / "pyproject.toml").read_text()
    target = re.search(r'"torch.distributed.backends"\]\nbps = "(.*)"', settings)
    assert target is not None
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", LOAD, target[1]]
    return harness.run_command(command, env=environment, within=120)


def test_it_registers_the_backend() -> None:
    found = load(os.pathsep.join([str(Path(bps_rdma.__file__).parents[1]), str(ROOT)]))
    assert found.stdout == "True\n", found.stderr
    assert "not available" not in found.stderr


@pytest.mark.parametrize(
    "fault",
    [
        "raise ImportError('libfoo.so.1 is missing')",
        *(pytest.param(fault, marks=pytest.mark.long) for fault in ("raise RuntimeError('no')", "x =")),
    ],
)
def test_a_broken_package_costs_a_warning(tmp_path: Path, fault: str) -> None:
    broken = tmp_path / "bps_rdma"
    broken.mkdir()
    (broken / "__init__.py").write_text(fault + "\n")
    (tmp_path / "bps_rdma_torch").symlink_to(ROOT / "bps_rdma_torch")
    found = load(str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert found.stdout == "False\n"
    assert "the torch backend 'bps' is not available" in found.stderr

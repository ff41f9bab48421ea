# SPDX-License-Identifier: Apache-2.0
"""The modules of the installed package."""

from __future__ import annotations

import ast
from pathlib import Path

import bps_rdma

ROOT = Path(bps_rdma.__file__).parent


def modules() -> dict[str, ast.Module]:
    """Every module of the installed package, by its full name."""
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = ("bps_rdma", *file.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found

# SPDX-License-Identifier: Apache-2.0
"""Connects the driver to Ray, if the user has not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray

import bps_rdma


def connect() -> None:
    """Do what `ray.init()` does, except for a driver that runs in a checkout of bps_rdma.

    Ray puts the driver's current directory in front of the path of all actors. A checkout, whose package has no native
    part, would hide the installed package there, as it does not on the driver (`python examples/ray/train.py`).
    """
    if ray.is_initialized():
        return
    here = Path.cwd()
    hides = (here / "bps_rdma" / "__init__.py").exists() and here.resolve() != Path(
        bps_rdma.__file__
    ).resolve().parents[1]
    if not hides:
        ray.init()
        return
    os.chdir(tempfile.gettempdir())
    try:
        ray.init()
    finally:
        os.chdir(here)

# SPDX-License-Identifier: Apache-2.0
"""`ddp_bench`: trains one model with each strategy of bps_rdma and with torch's DDP, side by side.

Structure: cli.py reads the options. launch.py starts the ranks and lets all methods (baselines.py) take turns, so that
they run under the same conditions. member.py is a rank, models.py has the models. figures.py computes the statistics,
and report.py shows them. Everything but this file imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bps_rdma import extras
from bps_rdma.terminal import print_error, run_app


def main(name: str = "ddp_bench", arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `name`; exits with status 1 where torch is not installed."""
    if not extras.is_installed("torch"):
        print_error("torch is not installed", extras.install_command("torch"))
        sys.exit(1)
    from bps_rdma.tools.compare.cli import app

    run_app(app, name, arguments)

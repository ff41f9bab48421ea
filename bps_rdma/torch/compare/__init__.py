# SPDX-License-Identifier: Apache-2.0
"""`ddp_bench`: trains one model with each strategy of bps_rdma and with torch's DDP, side by side.

Structure: cli.py reads the options. launch.py starts the ranks and lets all methods (baselines.py) take turns, so that
they run under the same conditions. member.py is a rank, models.py has the models. figures.py computes the statistics,
and report.py shows them.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(name: str = "ddp_bench", arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -m bps_rdma.torch.compare`; see bps_rdma.bench.ddp for the command."""
    from bps_rdma.terminal import run_app
    from bps_rdma.torch.compare.cli import app

    run_app(app, name, arguments)

# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command `ddp_bench`; reports a missing torch. See bps_rdma.torch.compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bps_rdma import extras
from bps_rdma.terminal import print_error


def main(name: str = "ddp_bench", arguments: Sequence[str] | None = None) -> None:
    """Compare strategies of data-parallel training; `name` is that of the command."""
    if not extras.is_installed("torch"):
        print_error("torch is not installed", extras.install_command("torch"))
        sys.exit(1)
    from bps_rdma.torch.compare import main as compare

    compare(name, arguments)

# SPDX-License-Identifier: Apache-2.0
"""Other libraries as baselines: one file each, imported only when requested."""

from __future__ import annotations

from bps_rdma import extras
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.bench.baselines import Implementation


def make_peer(name: str) -> Implementation:
    """Set up the baseline `name` for the rank of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a collective call.

    Raises InvalidArgumentError when its library is not installed.
    """
    try:
        from bps_rdma.tools.bench.peers.gloo import Gloo
    except ImportError as error:
        raise InvalidArgumentError(
            f"--compare {name} cannot import torch: {error}", extras.install_command("torch")
        ) from None
    return Gloo()

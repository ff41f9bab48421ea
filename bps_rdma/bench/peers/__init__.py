"""Other libraries as contenders: one file each, imported only when asked for."""

from __future__ import annotations

from bps_rdma.bench.contenders import Contender
from bps_rdma.errors import InvalidArgumentError


def make_peer(name: str) -> Contender:
    """Join the peer `name` as the rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; collective.

    Raises InvalidArgumentError when its library is not installed.
    """
    try:
        from bps_rdma.bench.peers.gloo import Gloo
    except ImportError as error:
        raise InvalidArgumentError(f"--compare {name} needs torch: {error}", "pip install 'bps_rdma[torch]'") from None
    return Gloo()

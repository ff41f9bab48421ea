# SPDX-License-Identifier: Apache-2.0
"""What torch loads to find the backend bps: the entry point of `torch.distributed.backends` (torch 2.14 and later).

It stands beside the package bps_rdma, because torch loads it in every program: where bps_rdma itself cannot be imported
there must be a warning, and not the end of `import torch`.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Makes the name bps known to torch.distributed; without effect, but for a warning, if bps_rdma is broken."""
    try:
        from bps_rdma.torch.backend import register as ours

        ours()
    except Exception as error:  # of whatever kind: it is not torch's user who has to deal with it
        warnings.warn(
            f"the torch backend 'bps' is not available: {error}; uninstall bps_rdma, or install it again", stacklevel=2
        )

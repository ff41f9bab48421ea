# SPDX-License-Identifier: Apache-2.0
"""The entry point of `torch.distributed.backends`, by which torch 2.14 and later find the backend bps.

Torch 2.14 loads it when a group asks for bps. It stands beside the package bps_rdma, so that a torch which loaded it in
every program would give a warning where bps_rdma cannot be imported, and no more: `import torch` must not end there.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Makes the name bps known to torch.distributed; if bps_rdma is broken, it only warns."""
    try:
        from bps_rdma.torch.backend import register as ours

        ours()
    except Exception as error:  # any kind of error: torch's user cannot deal with it
        warnings.warn(
            f"the torch backend 'bps' is not available: {error}; uninstall bps_rdma, or install it again", stacklevel=2
        )

# SPDX-License-Identifier: Apache-2.0
"""The former path of bps_rdma.tools.bench: `python -m bps_rdma.bench.peers` still works."""

from bps_rdma.tools.bench import __path__, main

__all__ = ["__path__", "main"]

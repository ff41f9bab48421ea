# SPDX-License-Identifier: Apache-2.0
"""BytePS's name of the module that has Compression: `Compression.none`, `.fp16` and `.bf16`."""

from bps_rdma.compression import Compression

__all__ = ["Compression"]

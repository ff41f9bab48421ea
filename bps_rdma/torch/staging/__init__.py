"""Collectives of tensors on a GPU: through pinned memory on the host, in chunks, while the GPU goes on.

Starting one notes how far the caller's CUDA stream is, and returns. A thread copies chunk after chunk into slots of
pinned memory once the GPU has got there, and sends each off; another waits for them and copies them back. So the copy
down, the wire and the copy up of different chunks overlap. Slots lie in memory that servers on the same host map, and
that is registered once: a chunk is copied twice, as it must be, and by the GPU's copy engines.

Operations of one group go in the order of their calls, which must be the same on all its ranks, as with NCCL.
"""

from __future__ import annotations

from bps_rdma.torch.staging.collectives import all_gather, all_reduce, device_of, reduce_scatter
from bps_rdma.torch.staging.operation import StagedOperation

__all__ = ["StagedOperation", "all_gather", "all_reduce", "device_of", "reduce_scatter"]

"""Where BytePS has DistributedDataParallel."""

from bps_rdma.torch.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

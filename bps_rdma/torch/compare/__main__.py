"""`python -m bps_rdma.torch.compare`."""

from bps_rdma.torch.compare import main

main()

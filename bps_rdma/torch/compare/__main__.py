# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.torch.compare`."""

from bps_rdma.torch.compare import main

main()

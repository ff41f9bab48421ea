# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.tools.compare` is ddp_bench."""

from bps_rdma.tools.compare import main

main()

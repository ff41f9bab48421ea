# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.tools.bench` is pushpull_bench."""

from bps_rdma.tools.bench import main

main()

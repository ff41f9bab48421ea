# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.bench` is pushpull_bench."""

from bps_rdma.bench import main

main()

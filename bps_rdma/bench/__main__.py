"""`python -m bps_rdma.bench` is pushpull_bench."""

from bps_rdma.bench import main

main()

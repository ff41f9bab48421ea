# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma` is the command `bps`."""

from bps_rdma.cli import main

if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Creates the environments of the MPI baselines; see environments.py."""

from __future__ import annotations

import sys

from bps_rdma.errors import BpsError
from bps_rdma.terminal import print_error
from bps_rdma.tools.bench.peers import environments
from bps_rdma.tools.bench.plan import MPI_BASELINES, parse_choices


def main() -> int:
    """Entry point; returns the exit status."""
    try:
        for name in parse_choices(",".join(sys.argv[1:]) or ",".join(MPI_BASELINES), MPI_BASELINES, "MPI library"):
            print(f"{name}: {environments.make(name)}", flush=True)
    except BpsError as error:
        print_error(error.message, error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""A rank that needs no torch: says who it is, and then does what the test asks for.

rank.py           one sum, and the end
rank.py forever   sums without end
rank.py killed    the same, until the last rank kills itself
"""

import os
import signal
import sys

import numpy as np

import bps_rdma as bps

what = sys.argv[1] if len(sys.argv) > 1 else "once"
bps.init()
total = float(bps.push_pull(np.float32([bps.rank()]), name="x", average=False)[0])
# One write, so that lines of several ranks do not mix.
os.write(1, f"rank {bps.rank()} of {bps.size()}: {total} {os.environ.get('BPS_JOB_ID', '')} "
            f"{os.environ.get('MASTER_PORT', '')} {os.uname().nodename}\n".encode())  # fmt: skip
rounds = 0
while what != "once":
    bps.push_pull(np.ones(1 << 16, np.float32), name="y")
    rounds += 1
    if what == "killed" and rounds == 10 and bps.rank() == bps.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
bps.shutdown()

# SPDX-License-Identifier: Apache-2.0
"""A job in whose third step the last rank is killed, and which goes on without it."""

import os
import signal

import numpy as np

import bps_rdma

bps_rdma.init()
step, steps = 0, 5
array = np.empty(1000, np.float32)


def train(step: int) -> None:
    """Some operations."""
    if step == 2 and bps_rdma.size() == int(os.environ["WORLD_SIZE"]) and bps_rdma.rank() == bps_rdma.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    array[:] = 1
    bps_rdma.push_pull_inplace(array, average=False, name="a")
    assert array[0] == bps_rdma.size()
    bps_rdma.commit()

# SPDX-License-Identifier: Apache-2.0
"""A job that goes on without the members that it loses."""

import time
from typing import Any

import harness
import numpy as np
from harness import mark

FAST = {"BPS_HEARTBEAT_TIMEOUT": str(3 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(5 * harness.PATIENCE)}
TOLD = {"BPS_SERVER_FAILOVER": "0"}  # of the loss of a server, as of that of a rank
COUNT = 300_000  # several partitions


def raise_as_a_program(error: Exception) -> None:
    """Ends this rank with an exception; a program's is reported by sys.excepthook, which the test's job replaces."""
    from bps_rdma.job import report_exception

    report_exception(error)
    raise error


def train(bps: Any, steps: int, last_size: int, fail_at: int = -1) -> dict[str, Any]:
    """Sums until the job has shrunk to `last_size` and `steps` more have been made; every sum is checked.

    A sum holds one number per rank, so that a contribution too many or too few would show.
    """
    sizes, texts = [bps.size()], []
    left, step = steps, 0
    array = np.empty(COUNT, np.float32)
    while left > 0:
        size = bps.size()
        step += 1
        if step == 3 and bps.rank() == fail_at:
            raise_as_a_program(ValueError("no such file"))
        try:
            for name in ("a", "b"):  # a step has several operations, and is repeated as a whole
                array[:] = 1 + bps.rank()
                bps.push_pull_inplace(array, name=name, average=False)
                assert array.min() == array.max() == size * (size + 1) / 2, (array.min(), array.max(), size)
            bps.commit()  # or one rank would count a step that another one repeats
        except bps.RoundAbortedError as error:
            kept = array.copy()
            texts.append(str(error))
            time.sleep(0.05)
            assert (array == kept).all(), "the array was written to after the exception"
            sizes.append(bps.size())
            continue
        if size == last_size:
            left -= 1
        if left == steps // 2:
            mark(f"size-{size}")
        if step == 5:
            mark("running")
    bps.barrier()
    return {"rank": bps.rank(), "sizes": sizes, "texts": texts}

# SPDX-License-Identifier: Apache-2.0
"""Jobs whose ranks sum on their host first."""

from typing import Any

import harness

PARTITION = 8192
SMALL_PARTITIONS = harness.cut_at(PARTITION)


def used(bps: Any) -> int:
    return int(bps.metrics()["total"]["host_sums"])

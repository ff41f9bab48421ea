# SPDX-License-Identifier: Apache-2.0
"""Jobs of bps_rdma on a Ray cluster, with Ray 2.60 or later.

import bps_rdma.ray

bps_rdma.ray.run(train, config, hosts=2, per_host=8)  # calls train(config) on 16 ranks; returns what they returned

`train` needs to know nothing of Ray: it finds the variables that torchrun sets.
"""

from bps_rdma import extras

extras.require("ray", "bps_rdma.ray")

from bps_rdma.ray.errors import Failure, JobFailedError, PlacementError, RayError, StartError  # noqa: E402  # they import Ray
from bps_rdma.ray.run import run  # noqa: E402

__all__ = ["Failure", "JobFailedError", "PlacementError", "RayError", "StartError", "run"]

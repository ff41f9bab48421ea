# SPDX-License-Identifier: Apache-2.0
"""Jobs of bps_rdma on a Ray cluster (`pip install 'bps_rdma[ray]'`).

import bps_rdma.ray

bps_rdma.ray.run(train, config, hosts=2, per_host=8)  # calls train(config) on 16 ranks; returns what they returned

`train` needs to know nothing of Ray: it finds the variables that torchrun sets.
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("bps_rdma.ray needs Ray, which is not installed: pip install 'bps_rdma[ray]'") from error
from bps_rdma.ray.errors import Failure, JobFailedError, PlacementError, RayError, StartError
from bps_rdma.ray.run import run

__all__ = ["Failure", "JobFailedError", "PlacementError", "RayError", "StartError", "run"]

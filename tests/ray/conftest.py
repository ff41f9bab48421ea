# SPDX-License-Identifier: Apache-2.0
"""Tests of bps_rdma.ray on a cluster of two nodes, both of them here: two raylets with resources of their own."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_FOLDER = tempfile.mkdtemp(prefix="bps-ray-")
os.environ |= {
    "RAY_TMPDIR": _FOLDER,
    "RAY_AUTH_MODE": "disabled",  # or it writes a token into the home folder
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    # Of an outer job: must not reach a rank.
    "RANK": "55", "BPS_RANK": "55", "SLURM_PROCID": "55", "DMLC_ROLE": "server", "BPS_SECRET": "of an outer job",
}  # fmt: skip

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.60'")
import ray_jobs  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from bps_rdma.ray.run import connect  # noqa: E402

_FOUND_BY_RANKS = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent), str(_TESTS / "shared")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _FOUND_BY_RANKS))


def pytest_report_header():
    return f"ray {ray.__version__}"


@pytest.fixture(scope="session")
def cluster_of_two():
    """The first node has 4 CPUs; the second has 4, and 2 of "bps_server"."""
    small = {"object_store_memory": 80_000_000, "num_cpus": 4}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    try:
        cluster.add_node(resources={"bps_server": 2}, **small)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        connect()  # from the checkout, as who tries the examples
        del os.environ["RAY_ADDRESS"]
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(_FOLDER, ignore_errors=True)


@pytest.fixture
def two_nodes(cluster_of_two):
    """The cluster; checks that a test leaves no process nor shared memory behind.

    Sockets of a job have no names in a file system, and go with its processes.
    """
    ray_jobs.await_nodes(cluster_of_two)
    with ray_jobs.nothing_left():
        yield cluster_of_two

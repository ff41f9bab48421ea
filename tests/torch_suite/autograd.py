# SPDX-License-Identifier: Apache-2.0
"""torch's own suite for DistributedDataParallel under distributed autograd, collected as suite.py is, and of its suite
for RPC the tests that are about process groups.

BPS_SUITE says as what: `gloo`, or `bps-as-gloo`.
"""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import DdpComparisonTest, DdpUnderDistAutogradTest
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest, RpcTestCommon
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests

torch.set_num_threads(1)
# The tests call other ranks as soon as they have a group themselves, and take it that these have theirs by then.
os.environ["TORCH_DIST_INIT_BARRIER"] = "1"

if os.environ["BPS_SUITE"] != "gloo":
    import bps_rdma.torch  # noqa: F401  registers the backend

    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_bps(backend=None, *args, **options):
        return init_process_group("bps" if backend in (None, "gloo") else backend, *args, **options)

    def new_bps_group(ranks=None, timeout=None, backend=None, *args, **options):
        return new_group(ranks, timeout, "bps" if backend == "gloo" else backend, *args, **options)

    dist.init_process_group, dist.new_group = init_bps, new_bps_group


class GroupsBesideRpcTest(RpcAgentTestFixture, RpcTestCommon):
    """The tests of RpcTest that are about process groups."""

    test_init_pg_then_rpc = RpcTest.test_init_pg_then_rpc
    test_init_rpc_then_pg = RpcTest.test_init_rpc_then_pg
    test_pg_init_no_rpc_init = RpcTest.test_pg_init_no_rpc_init


suites = [DdpUnderDistAutogradTest, DdpComparisonTest, GroupsBesideRpcTest]
globals().update(generate_tests("TensorPipe", TensorPipeRpcAgentTestFixture, suites, __name__))

# SPDX-License-Identifier: Apache-2.0
"""torch's own suite for torch.distributed, once: collected by pytest in the process that run.py starts.

BPS_SUITE says as what: `gloo` is torch's own backend, for comparison; `bps` names ours openly, so that tests which are
written for gloo or NCCL alone skip it; `bps-as-gloo` presents ours under gloo's name, so that gloo's tests run on it.
"""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import DistTestCases

MODE = os.environ["BPS_SUITE"]
os.environ["BACKEND"] = "bps" if MODE == "bps" else "gloo"  # what the suite reads, when it is imported
torch.set_num_threads(1)

if MODE != "gloo":
    import bps_rdma.torch  # noqa: F401  registers the backend

if MODE == "bps":
    for feature in ("ddp", "subgroup", "gpu", "plugin"):  # tests that need a GPU look for one themselves
        DistTestCases.backend_feature[feature].add("bps")

if MODE == "bps-as-gloo":
    import torch.distributed.distributed_c10d as c10d

    from bps_rdma.torch.backend import BpsProcessGroup

    init_process_group, new_group, get_backend = dist.init_process_group, dist.new_group, dist.get_backend

    def init_bps(backend=None, *args, **options):
        return init_process_group("bps" if backend in (None, "gloo") else backend, *args, **options)

    def new_bps_group(ranks=None, timeout=None, backend=None, *args, **options):
        return new_group(ranks, timeout, "bps" if backend == "gloo" else backend, *args, **options)

    def backend_seen(*args, **options):
        found = get_backend(*args, **options)
        return "gloo" if found == "bps" else found

    dist.init_process_group, dist.new_group = init_bps, new_bps_group
    dist.get_backend = c10d.get_backend = backend_seen
    BpsProcessGroup.getBackendName = lambda self: "gloo"
    make = BpsProcessGroup.__init__

    def make_with_gloo(self, *arguments, **options):
        make(self, *arguments, **options)
        # DDP's logger reads the options of gloo in a group of that name. This one is alone, and takes no operation.
        lonely = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1)
        self._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, lonely)

    BpsProcessGroup.__init__ = make_with_gloo

import torch.testing._internal.distributed.distributed_test as tests  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest  # noqa: E402

if MODE == "bps-as-gloo":
    events = tests.get_profiling_event

    def events_of_both(name, *args, **options):
        for event in events(name.replace("gloo:", "bps:"), *args, **options):
            event.name = event.name.replace("bps:", "gloo:")
        return events(name, *args, **options)

    tests.get_profiling_event = events_of_both


class TestDist(tests.TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Forked from this process, which has torch: the suite's own way, to start new interpreters, takes minutes more.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

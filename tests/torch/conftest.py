"""Tests of the torch face. Ranks are forked from a process that has imported torch too; see tests/python/cluster.py."""

from __future__ import annotations

import cluster
import torch

cluster.PRELOAD.extend(["torch", "torch.distributed", "bps_rdma.torch"])
torch.set_num_threads(1)  # of this process; the ranks' are set by OMP_NUM_THREADS

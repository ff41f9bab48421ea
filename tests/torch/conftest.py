# SPDX-License-Identifier: Apache-2.0
"""Tests of the torch face. Ranks are forked from a process that has imported torch too; see harness."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded: here, and in the process that ranks are forked from

import harness
import torch

# The last one is what making an optimizer imports, for seconds.
harness.PRELOAD.extend(["torch", "torch.distributed", "bps_rdma.torch", "torch._dynamo"])
torch.set_num_threads(1)

# SPDX-License-Identifier: Apache-2.0
"""The same with a model."""

from pathlib import Path

import torch
import torch.distributed as dist  # noqa: F401

import bps_rdma.torch  # noqa: F401

exec(Path(__file__).with_name("rendezvous.py").read_text())
model = torch.nn.Linear(4, 2)

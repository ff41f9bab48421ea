# SPDX-License-Identifier: Apache-2.0
"""The former path of bps_rdma.tools.scale_model."""

from bps_rdma.tools.scale_model import Hosts, Link, Prediction, Protocol, ring_seconds, simulate

__all__ = ["Hosts", "Link", "Prediction", "Protocol", "ring_seconds", "simulate"]

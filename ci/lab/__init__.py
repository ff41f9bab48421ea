# SPDX-License-Identifier: Apache-2.0
"""A lab of several hosts on one machine; see lab.py."""

from .host import Host, HostError
from .lab import Lab
from .process import Process

__all__ = ["Host", "HostError", "Lab", "Process"]

# SPDX-License-Identifier: Apache-2.0
"""The variables that torchrun sets, for a job of one rank."""

import os
import socket

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

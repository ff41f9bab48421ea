# SPDX-License-Identifier: Apache-2.0
"""Ports for the members of a job."""

from __future__ import annotations

import secrets
import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port nobody listens on, below the range from which the kernel takes ports of outgoing connections."""
    for _ in range(1000):
        port = 20000 + secrets.randbelow(12768)  # hypothesis seeds `random` alike in both workers
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for _ in range(100):
        first = free_port()
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind((LOOPBACK, port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports in a row")

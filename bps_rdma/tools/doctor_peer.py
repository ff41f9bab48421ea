# SPDX-License-Identifier: Apache-2.0
"""`bps doctor --serve` and `--peer`: a verified push_pull between two machines, over the transport of a job."""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

import bps_rdma as bps
from bps_rdma import _core, job
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.launch.environment import free_port

_ELEMENTS = 16 << 20  # 64 MiB
_ROUNDS = 5
_SMALL_ROUNDS = 200
# A documentation address (RFC 5737), whose route leads out of this machine.
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True)
class Rendezvous:
    """The address and port of the first of two doctors, and a code that only they know."""

    host: str
    port: int
    code: str
    rank: int

    @staticmethod
    def from_options(peer: str, code: str | None) -> Rendezvous:
        """The rendezvous that the options of the second doctor name.

        Raises:
            InvalidArgumentError: `peer` is not HOST:PORT, or the code is missing.
        """
        host, _, port = peer.rpartition(":")
        if not host or not port.isdigit() or not code:
            raise InvalidArgumentError(
                f"--peer {peer} needs the form HOST:PORT, and --code",
                "start `bps doctor --serve` on the other machine and use the command that it prints",
            )
        return Rendezvous(host.strip("[]"), int(port), code, rank=1)

    @staticmethod
    def create(config: _core.Config, port: int) -> Rendezvous:
        """A new rendezvous on this machine."""
        return Rendezvous(_core.local_address(config, _ELSEWHERE), port or free_port(), secrets.token_hex(8), rank=0)

    def print_command(self, timeout_s: float) -> None:
        """Print the command for the other machine to standard error; standard output holds the report."""
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        print(
            f"waiting for {timeout_s:.0f} s; start this on the other machine:\n"
            f"  bps doctor --peer {where} --code {self.code}",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class TransferResult:
    """The result of a transfer."""

    transport: str
    nbytes: int
    seconds: float  # median of a push_pull of nbytes
    small_seconds: float  # median of a push_pull of 8 bytes


def transfer(rendezvous: Rendezvous, timeout_s: float) -> TransferResult:
    """Connect to the other doctor and sum 64 MiB with it.

    Raises:
        BpsError: the doctors could not connect, the connection failed, or a sum was wrong.
    """
    settings = {
        "role": "",
        "rank": rendezvous.rank,
        "world_size": 2,
        "local_size": 1,
        "num_servers": "",
        "root_uri": rendezvous.host,
        "root_port": rendezvous.port,
        "job_id": "bps doctor",
        "secret": rendezvous.code,
        "join_timeout": timeout_s,
        "timeout": timeout_s,
    }
    job.join(settings, resumes=False)
    try:
        return _sum_together()
    finally:
        bps.shutdown()


def _sum_together() -> TransferResult:
    both = [np.random.default_rng(rank).integers(-(1 << 20), 1 << 20, _ELEMENTS, dtype=np.int32) for rank in range(2)]
    expected = both[0] + both[1]
    array = np.empty_like(expected)
    small = np.zeros(1, np.int64)
    large_s, small_s = [], []
    for _ in range(_ROUNDS):
        array[...] = both[bps.rank()]
        bps.barrier()
        begin = time.perf_counter()
        bps.push_pull_inplace(array, average=False, name="large")
        large_s.append(time.perf_counter() - begin)
        if not np.array_equal(array, expected):
            raise BpsError(
                f"{int((array != expected).sum())} of {_ELEMENTS} sums are wrong",
                "do not use this device: its driver, firmware or memory is faulty",
            )
    for _ in range(_SMALL_ROUNDS):
        begin = time.perf_counter()
        bps.push_pull_inplace(small, average=False, name="small")
        small_s.append(time.perf_counter() - begin)
    transport = bps.metrics()["transports"][1 - bps.rank()]
    return TransferResult(transport, array.nbytes, statistics.median(large_s), statistics.median(small_s))

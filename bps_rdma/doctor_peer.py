"""`bps doctor --serve` and `--peer`: a verified push_pull between two machines, over what a job there would use."""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

import bps_rdma as bps
from bps_rdma import _core
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.launch.environment import free_port

_ELEMENTS = 16 << 20  # 64 MiB
_ROUNDS = 5
_SMALL_ROUNDS = 200
# An address that belongs to nobody (RFC 5737): the way there is the way out of this machine.
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True)
class Meeting:
    """Where two doctors meet: the first one's address and port, and a code that only these two know."""

    host: str
    port: int
    code: str
    rank: int

    @staticmethod
    def called_at(peer: str, code: str | None) -> Meeting:
        """From the command line of the second one.

        Raises:
            InvalidArgumentError: `peer` is not HOST:PORT, or the code is missing.
        """
        host, _, port = peer.rpartition(":")
        if not host or not port.isdigit() or not code:
            raise InvalidArgumentError(
                f"--peer {peer} is not enough to find the other doctor",
                "start `bps doctor --serve` there and use the command that it prints: --peer HOST:PORT --code CODE",
            )
        return Meeting(host.strip("[]"), int(port), code, rank=1)

    @staticmethod
    def held_here(config: _core.Config, port: int) -> Meeting:
        """A new one, on this machine."""
        return Meeting(_core.local_address(config, _ELSEWHERE), port or free_port(), secrets.token_hex(8), rank=0)

    def invite(self, timeout_s: float) -> None:
        """Says what to start on the other machine; on stderr, so that stdout stays the report's."""
        where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        print(
            f"waiting for {timeout_s:.0f} s; start this on the other machine:\n"
            f"  bps doctor --peer {where} --code {self.code}",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Exchange:
    """What came of it."""

    transport: str
    nbytes: int
    seconds: float  # of one push_pull of nbytes, the median
    small_seconds: float  # of one of 8 bytes


def exchange(meeting: Meeting, timeout_s: float) -> Exchange:
    """Meets the other doctor and sums 64 MiB with it.

    Raises:
        BpsError: why they could not meet, what broke, or that a sum was wrong.
    """
    bps.init(
        role="",
        rank=meeting.rank,
        world_size=2,
        local_size=1,
        num_servers="",
        root_uri=meeting.host,
        root_port=meeting.port,
        job_id="bps doctor",
        secret=meeting.code,
        join_timeout=timeout_s,
        timeout=timeout_s,
    )
    try:
        return _sum_together()
    finally:
        bps.shutdown()


def _sum_together() -> Exchange:
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
    return Exchange(transport, array.nbytes, statistics.median(large_s), statistics.median(small_s))

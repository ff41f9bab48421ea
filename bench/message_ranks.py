# SPDX-License-Identifier: Apache-2.0
"""What each rank of bench/messages.py does for its launcher, and, as a program, a rank that uses MPI.

MPI's ranks run in an environment of their own, which has numpy and mpi4py and nothing else.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Arrays:
    """What one operation on int64 sends and receives; the contents show whether it was right.

    Args:
        kind: of the operation.
        elements: of one message; of all_to_all those of all messages of a rank.
        rank, size: of this process, and how many there are.
    """

    def __init__(self, kind: str, elements: int, rank: int, size: int) -> None:
        self._kind, self._rank, self._size = kind, rank, size
        elements -= elements % size if kind == "all_to_all" else 0
        self.own, self.got = np.empty(elements, np.int64), np.empty(elements, np.int64)
        self.parts = np.empty((size, elements), np.int64)

    def fill(self) -> None:
        self.own.fill(self._rank)
        self.got.fill(-1)
        self.parts[:] = np.arange(self._size)[:, None] if self._kind == "scatter" else -1

    def check(self) -> None:
        everybody = np.arange(self._size)[:, None]
        if self._kind == "all_to_all":
            right = bool((self.got.reshape(self._size, -1) == everybody).all())
        elif self._kind == "gather":
            right = self._rank > 0 or bool((self.parts == everybody).all())
        elif self._kind == "scatter":
            right = bool((self.got == self._rank).all())
        else:
            right = self._rank > 1 or bool((self.got == 1 - self._rank).all())
        assert right, f"{self._kind}: a wrong result"


def serve(
    channel: socket.socket,
    rank: int,
    size: int,
    begin: Callable[[Arrays, str, str], Callable[[], object]],
    fall_in_step: Callable[[], object],
) -> None:
    """Answers each request for a round with its seconds per call, until the launcher has ended.

    Args:
        channel: to the launcher.
        rank, size: of this process.
        begin: makes one call of arrays, a kind and a library.
        fall_in_step: a barrier.
    """
    with channel, channel.makefile("r") as requests, channel.makefile("w") as answers:
        asked: tuple[str, int] | None = None
        arrays: Arrays | None = None
        for request in map(json.loads, requests):
            kind, elements, calls = request["kind"], request["elements"], request["calls"]
            if arrays is None or asked != (kind, elements):
                asked, arrays = (kind, elements), Arrays(kind, elements, rank, size)
            call = begin(arrays, kind, request["library"])
            arrays.fill()
            fall_in_step()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            seconds = (time.perf_counter() - started) / calls
            arrays.check()
            answers.write(json.dumps({"seconds": seconds / 2 if kind == "ping-pong" else seconds}) + "\n")
            answers.flush()


def mpi_main(address: str) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def begin(arrays: Arrays, kind: str, _library: str) -> Callable[[], Any]:
        own, got, parts = arrays.own, arrays.got, arrays.parts if world.rank == 0 else None

        def ping_pong() -> None:
            if world.rank == 0:
                world.Send(own, 1)
                world.Recv(got, 1)
            elif world.rank == 1:
                world.Recv(got, 0)
                world.Send(own, 0)

        return {
            "ping-pong": ping_pong,
            "all_to_all": lambda: world.Alltoall(own, got),
            "gather": lambda: world.Gather(own, parts),
            "scatter": lambda: world.Scatter(parts, got),
        }[kind]

    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    try:
        serve(channel, world.rank, world.size, begin, world.Barrier)
    except BaseException:  # the others may wait in a collective call
        import traceback

        traceback.print_exc()
        world.Abort(1)


if __name__ == "__main__":
    import os

    mpi_main(os.environ["BPS_BENCH_CHANNEL"])

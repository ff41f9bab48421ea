# SPDX-License-Identifier: Apache-2.0
"""One rank of test_random_lives.py: does what lines of JSON on its standard input say, and answers each with a line.

Every array lies between two canary pages, and holds MINE whenever no call is using it.
"""

import json
import os
import sys
from typing import Any

import numpy as np

import bps_rdma as bps

PAGE, CANARY, MINE = 4096, 0xA5, 42.0


class Array:
    def __init__(self, memory: str, count: int) -> None:
        size = 4 * count + 2 * PAGE
        self.all = bps.empty(size, "uint8") if memory == "mapped" else np.empty(size, np.uint8)
        self.all.fill(CANARY)
        self.values = self.all[PAGE:-PAGE].view(np.float32)
        self.values.fill(MINE)

    def fault(self) -> str:
        bad = np.flatnonzero(self.values != MINE)
        if len(bad):
            return f"{len(bad)} of {len(self.values)} elements changed after the call, one to {self.values[bad[0]]}"
        around = np.concatenate([self.all[:PAGE], self.all[-PAGE:]])
        return "" if (around == CANARY).all() else "bytes around an array changed"


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.arrays: dict[int, Array] = {}
        self.groups: dict[int, Any] = {}
        self.pending: list[tuple[Any, Any]] = []  # handles that nobody waits for, and their arrays

    def init(self, port: int, transport: str) -> None:
        os.environ["MASTER_PORT"] = str(port)
        bps.init(transport=transport, timeout=10, heartbeat_timeout=10, shutdown_timeout=1)
        self.groups = {0: None}

    def shutdown(self) -> None:
        bps.shutdown()
        self.pending.clear()

    def group(self, number: int, ranks: list[int]) -> None:
        self.groups[number] = bps.new_group(ranks, f"group {number}")

    def make(self, number: int, memory: str, count: int) -> None:
        self.arrays[number] = Array(memory, count)

    def free(self, number: int) -> None:
        del self.arrays[number]

    def start(self, number: int, kind: str, group: int, value: float, timeout: float) -> Any:
        array = self.arrays[number].values
        array.fill(value)
        options: dict[str, Any] = {"name": f"{kind} {len(array)} {group}", "group": self.groups[group]}
        if kind == "push_pull":
            return bps.push_pull_async_inplace(array, average=False, timeout=timeout, **options)
        if kind == "copy":
            return bps.push_pull_async(array, average=False, timeout=timeout, **options)
        return bps.broadcast_async(array, root=0, timeout=timeout, **options)

    def call(self, **what: Any) -> dict[str, Any]:
        """One operation to its end. The array is ours again afterwards, whatever came out of it."""
        found: dict[str, Any] = {"error": "", "lowest": 0.0, "highest": 0.0}
        try:
            result = bps.synchronize(self.start(**what))
            found |= {"lowest": float(result.min()), "highest": float(result.max())}
        except bps.BpsError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        self.arrays[what["number"]].values.fill(MINE)
        return found

    def drop(self, **what: Any) -> None:
        """Starts an operation that nobody waits for; its array is not used any more."""
        self.start(**what)
        del self.arrays[what["number"]]

    def leave(self, **what: Any) -> str:
        """Starts an operation that no other rank takes part in, and leaves the job."""
        error = ""
        try:
            handle = self.start(**what)  # an error already, when the other rank was faster
            bps.shutdown()
            bps.synchronize(handle)
        except bps.BpsError as raised:
            error = type(raised).__name__
        bps.shutdown()
        self.arrays[what["number"]].values.fill(MINE)
        return error

    def check(self) -> list[str]:
        return [f"rank {self.rank}, array {number}: {fault}"
                for number, array in self.arrays.items() if (fault := array.fault())]  # fmt: skip

    def reset(self) -> None:
        bps.shutdown()
        self.arrays.clear()


def main() -> None:
    rank = Rank(int(os.environ["RANK"]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

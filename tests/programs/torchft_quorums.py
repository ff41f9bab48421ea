# SPDX-License-Identifier: Apache-2.0
"""Runs the process group of examples/torchft without torchft: two replicas, which meet in two quorums.

torchft itself wants another torch than the one that is tested. What it does with a process group is little: it makes
one for each quorum, with a store and the replica's place in it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import sys
import types
from datetime import timedelta

import torch
import torch.distributed as dist

REPLICAS = 2
QUORUMS = 2


class ProcessGroupWrapper:
    """What the example takes from torchft."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout


def replica(number: int, folder: str, port: int) -> None:
    sys.path.insert(0, folder)
    stand_in = types.ModuleType("torchft.process_group")
    vars(stand_in)["ProcessGroupWrapper"] = ProcessGroupWrapper
    sys.modules |= {"torchft": types.ModuleType("torchft"), "torchft.process_group": stand_in}
    example = importlib.import_module("process_group")
    store = dist.TCPStore("localhost", port)
    for quorum in range(QUORUMS):
        place = dist.PrefixStore(str(quorum), store)
        group = example.ProcessGroupBps(timedelta(seconds=60))._create_pg(place, number, REPLICAS)
        tensor = torch.full((1000,), number + 1.0)
        group.allreduce([tensor]).wait()
        assert (tensor == sum(range(1, REPLICAS + 1))).all()


def main() -> None:
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    spawn = multiprocessing.get_context("spawn")
    replicas = [spawn.Process(target=replica, args=(number, sys.argv[1], port)) for number in range(REPLICAS)]
    for one in replicas:
        one.start()
    for one in replicas:
        one.join()
        assert one.exitcode == 0, f"a replica ended with {one.exitcode}"
    del store
    print(f"{QUORUMS} quorums of {REPLICAS} replicas: every sum was right")


if __name__ == "__main__":
    main()

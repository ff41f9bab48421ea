# SPDX-License-Identifier: Apache-2.0
"""Replica groups of one process each train under torchft, and may be killed and started again at any time.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA=0 python train.py &
TORCHFT_LIGHTHOUSE=http://localhost:29510 REPLICA=1 python train.py
"""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bps_rdma.torch.torchft import ProcessGroupBps

STEPS = int(os.environ.get("STEPS", "50"))


def main() -> None:
    """Trains, and says after each step how long it took, with how many, and what the weights are."""
    replica = os.environ["REPLICA"]
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group: Any = {"bps": ProcessGroupBps, "gloo": ProcessGroupGloo}[os.environ.get("GROUP", "bps")]

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=group(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        replica_id=f"replica {replica}",
        hostname="localhost",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        use_async_quorum=False,
    )
    trained: Any = DistributedDataParallel(manager, model)
    optimizer: Any = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    last = time.monotonic()
    while manager.current_step() < STEPS:
        step = manager.current_step()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + int(replica)))
        optimizer.zero_grad()
        trained(inputs).square().mean().backward()
        optimizer.step()
        now = time.monotonic()
        weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:8]
        print(f"step {step} of {manager.num_participants()}: {now - last:.3f} s, weights {weights}", flush=True)
        last = now
        time.sleep(float(os.environ.get("PAUSE", "0.05")))
    manager.shutdown()


if __name__ == "__main__":
    main()

"""Callers who do not belong to the job: refused or ignored, and the job goes on."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import cluster
import fabric
import numpy as np
import pytest
from rank_main import await_mark, mark

RDMA = {"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": f"={fabric.HCA}"}
HERE = Path(__file__).parent
MAGIC, VERSION, REQUEST, DATA_PLANE = 0x44535042, 1, 1, 2  # private_data.cc; Plane in handshake.h
SIZE = 56


def request(version: int = VERSION, length: int = SIZE) -> bytes:
    """Looks like a request; job, nonce and proof are noise."""
    header = struct.pack("<IHBB", MAGIC, version, REQUEST, DATA_PLANE) + struct.pack("<IHH", 0, 0, 0)
    return (header + random.Random(7).randbytes(SIZE))[:length]


STRANGERS = {
    "nothing at all": b"\0",
    "noise": random.Random(1).randbytes(SIZE),
    "another version": request(version=VERSION + 1),
    "another job and secret": request(),
    "half a request": request(length=20),
}


def works_meanwhile(bps: Any) -> bool:
    right = True
    mark("ready")
    for round_ in range(200):
        right &= bool((bps.push_pull(np.full(1000, round_, np.float32), False, "x") == 2 * round_).all())
    bps.barrier()
    mark("worked")
    await_mark("end", timeout=300)
    return right and bool((bps.push_pull(np.ones(1000, np.float32), False, "x") == 2).all())


def doors(pids: list[int]) -> list[tuple[str, str]]:
    """Where these processes listen."""
    process_of = {int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()}
    found = [one for one in fabric.rdma("resource", "show", "cm_id") if one.get("state") == "LISTEN"]
    return [tuple(one["src-addr"].rsplit(":", 1)) for one in found if one.get("pid") in process_of]


def test_strangers_are_refused_and_the_job_goes_on():
    with cluster.start(works_meanwhile, workers=2, servers=1, env=RDMA) as job:
        job.await_marks("ready")
        (address, port), *_ = doors([job.pid("server 0")])
        before = None
        for who, data in STRANGERS.items():
            told = json.loads(
                fabric.command(fabric.SYSTEM_PYTHON, str(HERE / "pyverbs_stranger.py"), address, port, data.hex())
            )
            assert not told["connected"], f"{who} was let in"
            if before is None:
                job.await_marks("worked")
                before = fabric.resources()
        assert fabric.resources() == before, "strangers leave nothing behind"
        job.set_mark("end")
        assert job.results() == [True, True]


@pytest.mark.slow
def test_many_strangers_leave_nothing():
    with cluster.start(works_meanwhile, workers=2, servers=1, env=RDMA) as job:
        job.await_marks("worked", timeout=120)
        (address, port), *_ = doors([job.pid("server 0")])
        server = Path(f"/proc/{job.pid('server 0')}/fd")
        before = fabric.resources(), len(list(server.iterdir()))
        for seed in range(20):
            data = random.Random(seed).randbytes(SIZE)
            fabric.command(fabric.SYSTEM_PYTHON, str(HERE / "pyverbs_stranger.py"), address, port, data.hex())
        assert (fabric.resources(), len(list(server.iterdir()))) == before
        job.set_mark("end")
        assert job.results() == [True, True]

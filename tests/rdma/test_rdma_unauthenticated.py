# SPDX-License-Identifier: Apache-2.0
"""Peers that do not belong to the job are refused or ignored, and the job goes on."""

import hmac
import json
import random
import re
import socket
import struct
from pathlib import Path
from typing import Any

import fabric
import harness
import numpy as np
import pytest
from harness import await_mark, mark
from reference.handshake import VERSION, Credentials, shake_hands

RDMA = {"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": f"={fabric.HCA}"}
HERE = Path(__file__).parent
MAGIC, REQUEST, DATA_PLANE = 0x44535042, 1, 2  # handshake_messages.h, private_data.h; Plane in handshake.h
SIZE = 56


def request(version: int = VERSION, length: int = SIZE) -> bytes:
    """Looks like a request; job, nonce and proof are noise."""
    header = struct.pack("<IHBB", MAGIC, version, REQUEST, DATA_PLANE) + struct.pack("<IHHHH", 0, 0, 0, 0, 0)
    return (header + random.Random(7).randbytes(SIZE))[:length]


def request_of_a_member(node: int, nonce: bytes, credentials: Credentials) -> bytes:
    """What private_data.cc makes, made once more from its description."""
    said = struct.pack("<IHBBIHHHH", MAGIC, VERSION, REQUEST, DATA_PLANE, node, 0, 0, 0, 0)
    said += credentials.job[:4] + random.Random(node).randbytes(16)
    return said + hmac.digest(credentials.key, b"rdma client" + said + nonce + credentials.job, "sha256")[:16]


UNAUTHENTICATED = {
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


def listening_addresses(pids: list[int]) -> list[tuple[str, str]]:
    """Where these processes listen."""
    process_of = {int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()}
    found = [one for one in fabric.rdma("resource", "show", "cm_id") if one.get("state") == "LISTEN"]
    return [tuple(one["src-addr"].rsplit(":", 1)) for one in found if one.get("pid") in process_of]


def connect(address: str, port: str, data: bytes) -> dict[str, Any]:
    program = str(HERE / "pyverbs_unauthenticated.py")
    return dict(json.loads(fabric.command(fabric.SYSTEM_PYTHON, program, address, port, data.hex())))


def test_a_peer_with_the_secret_takes_nobodys_place():
    """A second implementation of the hello; it passes for the server, for a worker that is there, for nobody known."""
    with harness.start(works_meanwhile, workers=2, servers=1, env=RDMA | {"BPS_LOG_LEVEL": "debug"}) as job:
        job.await_marks("worked")
        (address, port), *_ = listening_addresses([job.pid("server 0")])
        nonce = bytes.fromhex(re.findall(r"listens by rdma at ([0-9a-f]{32}) ", job.log("server 0"))[0])
        base = Credentials.of(job.name, job.name)
        with socket.create_connection(("127.0.0.1", job.port)) as scheduler:
            member = base.within(shake_hands(scheduler, base).view)
        guessed = Credentials(member.job, Credentials.of(job.name, "another secret").key)
        earlier = base.within(bytes(12))  # as it would be in another run
        for stranger in (guessed, earlier, base):
            assert not connect(address, port, request_of_a_member(1, nonce, stranger))["connected"]
        for node in (1, 2, 3, 77):  # ids: the workers, then the server
            told = connect(address, port, request_of_a_member(node, nonce, member))
            assert told.get("write", "refused") == "refused", told  # most often it is rejected before it can write
        log = job.log("server 0")  # its proof was good, or it would not come as far as here
        assert log.count("whose connections are complete") == 2, log
        assert log.count("is not a worker of this job") == 2, log
        job.set_mark("end")
        assert job.results() == [True, True]


def test_unauthenticated_peers_are_refused_and_the_job_goes_on():
    with harness.start(works_meanwhile, workers=2, servers=1, env=RDMA) as job:
        job.await_marks("ready")
        (address, port), *_ = listening_addresses([job.pid("server 0")])
        before = None
        for who, data in UNAUTHENTICATED.items():
            assert not connect(address, port, data)["connected"], f"{who} was accepted"
            if before is None:
                job.await_marks("worked")
                before = fabric.resources()
        assert fabric.resources() == before, "unauthenticated peers leave nothing behind"
        job.set_mark("end")
        assert job.results() == [True, True]


@pytest.mark.long
@pytest.mark.slow
def test_many_unauthenticated_peers_leave_nothing():
    with harness.start(works_meanwhile, workers=2, servers=1, env=RDMA) as job:
        job.await_marks("worked", timeout=120)
        (address, port), *_ = listening_addresses([job.pid("server 0")])
        server = Path(f"/proc/{job.pid('server 0')}/fd")
        before = fabric.resources(), len(list(server.iterdir()))
        for seed in range(8):
            connect(address, port, random.Random(seed).randbytes(SIZE))
        assert (fabric.resources(), len(list(server.iterdir()))) == before
        job.set_mark("end")
        assert job.results() == [True, True]

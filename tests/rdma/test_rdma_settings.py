# SPDX-License-Identifier: Apache-2.0
"""Settings of the fabric, as far as rxe shows their effect: addresses, GID index, traffic class, partition key.

The service level leaves no trace on Ethernet; that connections with it work is all that can be tested here.
"""

import ipaddress
import socket
from pathlib import Path
from typing import Any

import fabric
import harness
import numpy as np
import pytest
from bodies.sums import rounds_of
from levels import cases

RDMA = {"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": f"={fabric.HCA}", "BPS_LOG_LEVEL": "info"}
ALL_PACKETS = 3
ROCE_PORT = 4791
RELIABLE = range(0x20)  # opcodes of reliable connections; those of the connection manager's messages are larger


def gid_index(address: str) -> int:
    """Of that address, in the version of RoCE that routers forward."""
    port = Path("/sys/class/infiniband") / fabric.HCA / "ports/1"
    for path in sorted((port / "gids").iterdir(), key=lambda path: int(path.name)):
        try:
            version = (port / "gid_attrs/types" / path.name).read_text().strip()
        except OSError:  # an empty entry
            continue
        gid = ipaddress.IPv6Address(path.read_text().strip())
        if version == "RoCE v2" and address in (str(gid), str(gid.ipv4_mapped)):
            return int(path.name)
    raise LookupError(address)


def logs_of(env: dict[str, str]) -> str:
    """What rank 0 of a job has logged that summed what it should."""
    with harness.start(rounds_of, 3, 100_000, workers=2, env=env) as job:
        assert job.results() == [[], []]
        return job.log("rank 0")


@pytest.mark.vm
@pytest.mark.long
def test_ipv6():
    log = logs_of(RDMA | {"BPS_NODE_HOST": "fd98::1"})
    assert "RoCE v2, IPv6 fd98::1 of d0, the address of this process" in log


@pytest.mark.vm
@pytest.mark.parametrize("address", cases(["fd98::1"], ["10.98.0.1"]))
def test_the_gid_index_decides(address):
    index = gid_index(address)
    log = logs_of(RDMA | {"BPS_RDMA_GID_INDEX": str(index)})
    assert f"GID {index}: RoCE v2, {'IPv6' if ':' in address else 'IPv4'} {address}" in log


def traffic_classes(device: str, run: Any) -> set[int]:
    """Those of the packets of reliable connections that pass an interface meanwhile."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PACKETS)) as packets:
        packets.bind((device, 0))
        packets.setblocking(False)
        run()
        seen = set()
        while True:
            try:
                packet = packets.recv(128)
            except BlockingIOError:
                return seen
            ip, udp = packet[14:], packet[34:]
            if packet[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_UDP:
                continue
            if int.from_bytes(udp[2:4], "big") == ROCE_PORT and udp[8] in RELIABLE:
                seen.add(ip[1])


@pytest.mark.vm
@pytest.mark.parametrize("wanted", cases([104], [None]))
def test_the_traffic_class_is_that_of_every_packet(cable, wanted):
    env = {"BPS_TRANSPORT": "rdma"} | ({} if wanted is None else {"BPS_RDMA_TC": str(wanted)})

    def job() -> None:
        assert harness.run(rounds_of, 3, 100_000, workers=2, env=env, rank_env=cable.rank_env()) == [[], []]

    assert traffic_classes(cable.ends[0].netdev, job) == {wanted or 0}


@pytest.mark.vm
@pytest.mark.long
def test_a_service_level_and_the_only_partition_key():
    logs_of(RDMA | {"BPS_RDMA_SL": "3", "BPS_RDMA_PKEY": "0"})


def refused(bps: Any) -> str:
    try:
        bps.init()
        bps.push_pull(np.ones(10, np.float32), name="x")
    except bps.BpsError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.vm
def test_a_gid_index_that_does_not_exist_is_named():
    env = RDMA | {"BPS_RDMA_GID_INDEX": "999"}
    for said in harness.run(refused, workers=2, env=env, init=False):
        assert "there is no GID with index 999" in said

# SPDX-License-Identifier: Apache-2.0
"""Verbs by pyverbs, someone else's binding of them; run as a program of its own, prints JSON.

    pyverbs_peer.py query DEVICE             what the device offers
    pyverbs_peer.py write DEVICE BYTES       one RDMA WRITE with immediate from one queue pair to another
    pyverbs_peer.py wrong_key DEVICE         the same with a wrong remote key
    pyverbs_peer.py out_of_bounds DEVICE     the same beyond the end of the remote memory

Needs nothing but python3-pyverbs: it runs under the distribution's Python, not under that of the tests.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

PORT = 1
IMMEDIATE, NEXT = 0xABCD1234, 0x55
LIMIT_S = 60  # of a completion, on a machine that is busy with other things
GUARD = 64  # bytes on either side of the target that nobody may touch


class Side:
    """One end: a queue pair with memory of its own."""

    def __init__(self, context: Context, size: int) -> None:
        self.context = context
        self.pd = PD(context)
        self.cq = CQ(context, 16)
        caps = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=2, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=caps))
        self.size = size + 2 * GUARD
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.mr = MR(self.pd, self.size, access)
        self.mr.write(b"\xee" * self.size, self.size)

    def connect(self, other: Side, gid_index: int) -> None:
        """INIT, RTR, RTS; by hand, as there is no rdma_cm here."""
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.qp.to_init(attr)
        route = GlobalRoute(dgid=self.context.query_gid(PORT, gid_index), sgid_index=gid_index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num = other.qp.qp_num
        attr.rq_psn = attr.sq_psn = 0
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 7, 7
        self.qp.to_rtr(attr)
        self.qp.to_rts(attr)

    def expect(self) -> None:
        """Posts a receive request. Nothing lands in its buffer, which is there because pyverbs asks for one."""
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, GUARD, self.mr.lkey)]))

    def completion(self) -> object:
        """The next work completion."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            count, found = self.cq.poll(1)
            if count:
                return found[0]
        raise TimeoutError(f"no completion within {LIMIT_S} s")


def routable_gid(device: str) -> int:
    """Index of the GID of an IPv4 address (RoCE v2), else of the first one."""
    folder = Path("/sys/class/infiniband") / device / f"ports/{PORT}/gids"
    gids = {int(path.name): path.read_text().strip() for path in folder.iterdir()}
    mapped = [index for index, gid in sorted(gids.items()) if gid.startswith("0000:0000:0000:0000:0000:ffff:")]
    return mapped[-1] if mapped else 0


def pair(device: str, size: int) -> tuple[Side, Side]:
    """Two connected ends, each with a device context of its own, as two processes would have."""
    ends = Side(Context(name=device), size), Side(Context(name=device), size)
    gid = routable_gid(device)
    ends[0].connect(ends[1], gid)
    ends[1].connect(ends[0], gid)
    return ends


def post_write(near: Side, far: Side, length: int, rkey: int, address: int, number: int = IMMEDIATE) -> None:
    """RDMA WRITE with that immediate, and that id, of `length` bytes that follow the guard."""
    piece = SGE(near.mr.buf + GUARD, length, near.mr.lkey)
    request = SendWR(
        wr_id=number,
        opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
        send_flags=e.IBV_SEND_SIGNALED,
        num_sge=1,
        sg=[piece],
        imm_data=socket.htonl(number),
    )
    request.set_wr_rdma(rkey, address)
    near.qp.post_send(request)
    del far


def query(device: str) -> dict[str, object]:
    """Some of ibv_query_device()."""
    found = Context(name=device).query_device()
    return {
        "name": device,
        "max_qp_wr": found.max_qp_wr,
        "max_sge": found.max_sge,
        "max_srq": found.max_srq,
    }


def write(device: str, size: int) -> dict[str, object]:
    """What both ends see of one write."""
    near, far = pair(device, size)
    far.expect()
    payload = bytes((i * 7 + 3) % 251 for i in range(size))
    if size:
        near.mr.write(payload, size, GUARD)
    far.expect()
    post_write(near, far, size, far.mr.rkey, far.mr.buf + GUARD)
    arrived = far.completion()
    sent = near.completion()
    assert arrived.status == e.IBV_WC_SUCCESS, arrived.status
    assert sent.status == e.IBV_WC_SUCCESS, sent.status
    # A connection keeps the order: what the first write still completed would come before what the next one does.
    post_write(near, far, 0, far.mr.rkey, far.mr.buf + GUARD, NEXT)
    more = 0
    while socket.ntohl(far.completion().imm_data) != NEXT or near.completion().wr_id != NEXT:
        more += 1
    memory = far.mr.read(far.size, 0)
    return {
        "receive_opcode": "RECV_RDMA_WITH_IMM" if arrived.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM else arrived.opcode,
        "immediate": socket.ntohl(arrived.imm_data),
        "bytes": arrived.byte_len,
        "payload_equal": memory[GUARD : GUARD + size] == payload,
        "around_untouched": memory[:GUARD] + memory[GUARD + size :] == b"\xee" * (2 * GUARD),
        "completions": 1 + more,
    }


def refused(device: str, rkey_off: int, address_off: int) -> dict[str, object]:
    """The sender's status of a write that the other end must not take."""
    near, far = pair(device, 4096)
    far.expect()
    post_write(near, far, 4096, far.mr.rkey ^ rkey_off, far.mr.buf + GUARD + address_off)
    status = near.completion().status
    assert far.mr.read(far.size, 0) == b"\xee" * far.size
    return {"status": "Remote access error" if status == e.IBV_WC_REM_ACCESS_ERR else status}


def main(what: str, device: str, *args: str) -> dict[str, object]:
    """Entry."""
    if what == "query":
        return query(device)
    if what == "write":
        return write(device, int(args[0]))
    return refused(device, 0x5A00, 0) if what == "wrong_key" else refused(device, 0, 3 * GUARD)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

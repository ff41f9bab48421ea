"""Somebody else's rdma_cm client, by pyverbs: calls a door and says what became of it; prints JSON.

    pyverbs_stranger.py ADDRESS PORT HEX      connects with HEX as private data

Runs under the distribution's Python, like pyverbs_peer.py.
"""

from __future__ import annotations

import json
import sys

import pyverbs.cm_enums as ce
import pyverbs.enums as e
from pyverbs.cmid import CMID, AddrInfo, ConnParam
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPCap, QPInitAttr


def call(address: str, port: str, data: bytes) -> dict[str, object]:
    """Whether the door let us in; and if not, with which error."""
    where = AddrInfo(dst=address, dst_service=port, port_space=ce.RDMA_PS_TCP)
    pair = QPInitAttr(qp_type=e.IBV_QPT_RC, cap=QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1))
    caller = CMID(creator=where, qp_init_attr=pair)
    parameters = ConnParam(data_len=len(data))
    parameters.set_private_data(data)
    try:
        caller.connect(parameters)
    except PyverbsError as error:
        return {"connected": False, "error": str(error)}
    return {"connected": True, "error": ""}


if __name__ == "__main__":
    print(json.dumps(call(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]))))

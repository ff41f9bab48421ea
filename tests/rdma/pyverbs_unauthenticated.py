# SPDX-License-Identifier: Apache-2.0
"""An rdma_cm client that is not ours, by pyverbs: connects to a listener and prints as JSON what became of that.

    pyverbs_unauthenticated.py ADDRESS PORT HEX

It connects with HEX as private data; if it is accepted, it writes to memory that it was not granted.

Runs under the distribution's Python, like pyverbs_peer.py.
"""

import json
import sys

import pyverbs.cm_enums as ce
import pyverbs.enums as e
from pyverbs.cmid import CMID, AddrInfo, ConnParam
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QPCap, QPInitAttr


def call(address: str, port: str, data: bytes) -> dict[str, object]:
    """Whether the listener accepted us, else with which error; how a write to memory that is not ours ended."""
    where = AddrInfo(dst=address, dst_service=port, port_space=ce.RDMA_PS_TCP)
    pair = QPInitAttr(qp_type=e.IBV_QPT_RC, cap=QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1))
    caller = CMID(creator=where, qp_init_attr=pair)
    parameters = ConnParam(data_len=len(data))
    parameters.set_private_data(data)
    try:
        caller.connect(parameters)
    except PyverbsError as error:
        return {"connected": False, "error": str(error)}
    memory = caller.reg_msgs(4096)
    try:
        caller.post_write(memory, 4096, 0x10000, 0x5A5A, e.IBV_SEND_SIGNALED)
        status = caller.get_send_comp().status
    except PyverbsError as error:  # the listener has rejected us before we could
        return {"connected": True, "error": str(error), "write": "refused"}
    return {"connected": True, "error": "", "write": "done" if status == e.IBV_WC_SUCCESS else "refused"}


if __name__ == "__main__":
    print(json.dumps(call(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]))))

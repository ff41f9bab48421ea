# Two mends of rxe, applied to rxe_comp.c and rxe_req.c in drivers/infiniband/sw/rxe.

# The acknowledgement of a request that is being repeated
# at this moment moved qp->comp.psn beyond the request, but did not complete it. If it had to be repeated once more, the
# requester took up behind its end: it sent an empty request that nobody had posted, and gave all later ones numbers that
# the peer had seen on others. The connection then broke ("remote invalid request error"): with three workers on one
# server in most jobs. The end of the repetition is acknowledged, too, so that this one may be dropped.
/case COMPST_WRITE_SEND:/,/case COMPST_COMP_ACK:/s/^\(\t*\)else$/\1else if (wqe->last_psn == pkt->psn)\n\1\tstate = COMPST_DONE;\n\1else/

# A message of the connection manager that finds no route, because the interface is down, put its queue pair (number 1)
# into the error state. The kernel's MAD layer takes that for "send queue error", as a card has it, and brings only the
# sending half back: the device received no connection request or reply any more, until it was removed and added again.
# Linux 6.12 does so in rxe_req.c as well.
s/^\(\t*\)rxe_qp_error(qp);/\1if (qp_type(qp) == IB_QPT_GSI)\n\1\tqp->attr.qp_state = IB_QPS_SQE;\n\1else\n\1\trxe_qp_error(qp);/

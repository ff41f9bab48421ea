# A mend of rxe, applied to drivers/infiniband/sw/rxe/rxe_comp.c. The acknowledgement of a request that is being repeated
# at this moment moved qp->comp.psn beyond the request, but did not complete it. If it had to be repeated once more, the
# requester took up behind its end: it sent an empty request that nobody had posted, and gave all later ones numbers that
# the peer had seen on others. The connection then broke ("remote invalid request error"): with three workers on one
# server in most jobs. The end of the repetition is acknowledged, too, so that this one may be dropped.
/case COMPST_WRITE_SEND:/,/case COMPST_COMP_ACK:/s/^\(\t*\)else$/\1else if (wqe->last_psn == pkt->psn)\n\1\tstate = COMPST_DONE;\n\1else/

// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/shared_receive_queue.h"

#include "transport/rdma/context.h"
#include "transport/rdma/wire.h"

namespace bps::transport::rdma {

SharedReceiveQueue::SharedReceiveQueue(const Rail& rail, ibv_pd* pd) {
  ibv_srq_init_attr wanted{};
  wanted.attr.max_wr = kSharedReceives;
  wanted.attr.max_sge = 1;  // none is used; some drivers refuse 0
  srq_.reset(::ibv_create_srq(pd, &wanted));
  if (!srq_) fail_making("a shared receive queue", rail);
  for (std::size_t i = 0; i < empty_receives_.size(); ++i) {
    empty_receives_[i].wr_id = WrId(WrId::Kind::kEmptyReceive, 0).value();
    empty_receives_[i].next = i + 1 < empty_receives_.size() ? &empty_receives_[i + 1] : nullptr;
  }
  refill();
}

void SharedReceiveQueue::post_missing() {
  while (missing_ >= kRepostBatch) {
    ibv_recv_wr* bad = nullptr;
    // A full queue means that more receives were there than were counted, which does no harm.
    if (ibv_post_srq_recv(srq_.get(), empty_receives_.data(), &bad) != 0) {
      missing_ = 0;
      return;
    }
    missing_ -= kRepostBatch;
  }
}

void SharedReceiveQueue::refill() {
  shortage_ = false;
  missing_ = kSharedReceives;
  post_missing();
  // The device says once when no more than this many are left. Not every device can, and none has to.
  ibv_srq_attr low{};
  low.srq_limit = kSharedReceives / 4;
  ::ibv_modify_srq(srq_.get(), &low, IBV_SRQ_LIMIT);
}

}  // namespace bps::transport::rdma

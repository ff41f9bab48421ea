// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/queue_pair.h"

#include <cerrno>

#include "transport/rdma/context.h"

namespace bps::transport::rdma {
namespace {

constexpr std::uint32_t kInlineWish = 256;  // a header and a small payload travel within the request

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Context> context, Plane plane) : context_(std::move(context)) {
  const bool data = plane == Plane::kData;
  const std::uint32_t sends = data ? kDataWindow : kControlSends;
  const std::uint32_t receives = data ? 0 : kControlReceives;
  sends_ = context_->sent.reserve(sends);
  receives_ = context_->received.reserve(receives);

  ibv_qp_init_attr wanted{};
  wanted.send_cq = context_->sent.get();
  wanted.recv_cq = context_->received.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = sends;
  wanted.cap.max_send_sge = 2;
  if (data) {
    wanted.srq = context_->shared_receives.get();
  } else {
    wanted.cap.max_recv_wr = receives;
    wanted.cap.max_recv_sge = 1;
  }
  for (const std::uint32_t limit : {kInlineWish, 64U, 0U}) {
    wanted.cap.max_inline_data = limit;
    ibv_qp_init_attr attempt = wanted;  // the driver writes what it gives into it
    qp_.reset(::ibv_create_qp(context_->pd(), &attempt));
    inline_limit_ = attempt.cap.max_inline_data;
    if (qp_ || errno != EINVAL) break;
  }
  if (!qp_) fail_making("a queue pair", context_->rail());
}

QueuePair& QueuePair::operator=(QueuePair&& other) noexcept {
  reset();
  context_ = std::move(other.context_);
  sends_ = std::move(other.sends_);
  receives_ = std::move(other.receives_);
  inline_limit_ = other.inline_limit_;
  qp_ = std::move(other.qp_);
  return *this;
}

bool QueuePair::stop() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  return ::ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE) == 0;
}

void QueuePair::reset() {
  if (qp_ && stop()) context_->retired.add({std::move(sends_), std::move(receives_), std::move(qp_)});
  qp_.reset();  // the device of the queue pair does not answer any more
  sends_.end();
  receives_.end();
  context_.reset();
}

}  // namespace bps::transport::rdma

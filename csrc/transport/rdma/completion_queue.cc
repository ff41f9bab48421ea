// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/completion_queue.h"

#include <cerrno>

#include "transport/rdma/context.h"

namespace bps::transport::rdma {
namespace {

constexpr unsigned kAckBatch = 64;  // acknowledging takes a lock

}  // namespace

CompletionQueue::CompletionQueue(const Rail& rail, ibv_context* device, ibv_comp_channel* channel,
                                 std::uint32_t reserved, std::uint32_t size, std::uint32_t limit)
    : rail_(rail),
      budget_(reserved, size, limit),
      cq_(::ibv_create_cq(device, static_cast<int>(budget_.size()), nullptr, channel, 0)) {
  if (!cq_) fail_making("a completion queue", rail);
}

CompletionQueue::~CompletionQueue() {
  if (events_ > 0) ::ibv_ack_cq_events(cq_.get(), events_);
}

CompletionQueue::Reservation CompletionQueue::reserve(std::uint32_t entries) {
  const std::lock_guard lock(mutex_);
  const auto size = budget_.reserve(entries);
  if (!size) {
    throw Error(ErrorCode::kTransport,
                rail_.device + " has completion queues of " + std::to_string(budget_.limit()) +
                    " entries at most, which the connections of this loop have used up",
                "use more server loops (BPS_SERVER_ENGINE_THREAD), fewer BPS_RDMA_QPS, or another device");
  }
  if (static_cast<std::uint32_t>(cq_->cqe) < *size) {
    if (const int error = ::ibv_resize_cq(cq_.get(), static_cast<int>(*size)); error != 0) {
      budget_.release(entries);
      errno = error;
      fail_making("a larger completion queue", rail_);
    }
  }
  return {*this, entries};
}

void CompletionQueue::give_back(std::uint32_t entries) {
  const std::lock_guard lock(mutex_);
  returned_ += entries;
  has_returns_.store(true, std::memory_order_relaxed);
}

void CompletionQueue::take_returns() {
  const std::lock_guard lock(mutex_);
  budget_.release(std::exchange(returned_, 0));
  has_returns_.store(false, std::memory_order_relaxed);
}

void CompletionQueue::take_event() {
  armed_ = false;
  if (++events_ < kAckBatch) return;
  ::ibv_ack_cq_events(cq_.get(), events_);
  events_ = 0;
}

}  // namespace bps::transport::rdma

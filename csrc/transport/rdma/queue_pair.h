// SPDX-License-Identifier: Apache-2.0
// Owns a reliable queue pair and its entries in the completion queues. It is made by the thread that connects, and then
// belongs to that of the loop.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/rdma/completion_queue.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

class Context;

class QueuePair {
 public:
  QueuePair() = default;
  // May be called from any thread. Throws Error.
  QueuePair(std::shared_ptr<Context> context, Plane plane);
  QueuePair(QueuePair&& other) noexcept = default;
  QueuePair& operator=(QueuePair&& other) noexcept;
  ~QueuePair() { reset(); }

  // After the return the device touches no memory for it.
  void reset();
  explicit operator bool() const { return qp_ != nullptr; }
  ibv_qp* get() const { return qp_.get(); }
  std::uint32_t number() const { return qp_->qp_num; }
  std::uint32_t inline_limit() const { return inline_limit_; }

 private:
  bool stop();

  std::shared_ptr<Context> context_;
  CompletionQueue::Reservation sends_;
  CompletionQueue::Reservation receives_;
  std::uint32_t inline_limit_ = 0;
  Qp qp_;
};

}  // namespace bps::transport::rdma

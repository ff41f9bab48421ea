// SPDX-License-Identifier: Apache-2.0
// A completion queue that cannot overflow: a queue pair reserves its entries when it is made, and the queue grows with
// them, or refuses.
//
// Threading: reserve() and the end of a reservation on any thread; everything else on the loop's. Errors: reserve()
// throws Error.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "transport/rdma/capacity.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

class CompletionQueue {
 public:
  // The entries of one queue pair. When they end, its completions may still lie in the queue: they count until
  // settle().
  class Reservation {
   public:
    Reservation() = default;
    Reservation(CompletionQueue& queue, std::uint32_t entries) : queue_(&queue), entries_(entries) {}
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept {
      end();
      queue_ = std::exchange(other.queue_, nullptr);
      entries_ = other.entries_;
      return *this;
    }
    ~Reservation() { end(); }
    void end() {
      if (queue_ != nullptr) std::exchange(queue_, nullptr)->give_back(entries_);
    }

   private:
    CompletionQueue* queue_ = nullptr;
    std::uint32_t entries_ = 0;
  };

  // `reserved`: entries taken for good; `size`: of the queue at first; `limit`: of the device.
  CompletionQueue(const Rail& rail, ibv_context* device, ibv_comp_channel* channel, std::uint32_t reserved,
                  std::uint32_t size, std::uint32_t limit);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  ibv_cq* get() const { return cq_.get(); }
  Reservation reserve(std::uint32_t entries);
  // The queue has just been seen empty: what belonged to queue pairs that are gone can be used again.
  void settle() {
    if (has_returns_.load(std::memory_order_relaxed)) take_returns();
  }

  // From now on a completion makes the channel readable, once.
  void arm() {
    if (!armed_) armed_ = ibv_req_notify_cq(cq_.get(), 0) == 0;
  }
  bool is_armed() const { return armed_; }
  // The channel has brought an event of this queue.
  void take_event();

 private:
  void give_back(std::uint32_t entries);
  void take_returns();

  const Rail& rail_;
  std::mutex mutex_;  // the budget: connections are made on their callers' threads
  QueueBudget budget_;
  std::uint32_t returned_ = 0;
  std::atomic<bool> has_returns_{false};
  Cq cq_;
  bool armed_ = false;   // no event has come since; asking again would be a system call for nothing
  unsigned events_ = 0;  // seen; they have to be acknowledged before the queue can go
};

}  // namespace bps::transport::rdma

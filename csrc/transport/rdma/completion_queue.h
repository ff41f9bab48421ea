// SPDX-License-Identifier: Apache-2.0
// Keeps a completion queue from overflowing. A queue pair reserves its entries when it is made, and the queue grows
// with them, or refuses.
//
// A reservation may be made and ended on any thread; everything else belongs to the thread of the loop. reserve()
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
  // Holds the entries of one queue pair. When it ends, completions of the queue pair may still lie in the queue, so its
  // entries count until settle().
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

  // `reserved` entries are taken for good. `size` is that of the queue at first, and `limit` that of the device.
  CompletionQueue(const Rail& rail, ibv_context* device, ibv_comp_channel* channel, std::uint32_t reserved,
                  std::uint32_t size, std::uint32_t limit);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  ibv_cq* get() const { return cq_.get(); }
  Reservation reserve(std::uint32_t entries);
  // Is called when the queue has just been seen empty. Frees the entries of queue pairs that are gone.
  void settle() {
    if (has_returns_.load(std::memory_order_relaxed)) take_returns();
  }

  // From now on a completion makes the channel readable, once.
  void arm() {
    if (!armed_) armed_ = ibv_req_notify_cq(cq_.get(), 0) == 0;
  }
  bool is_armed() const { return armed_; }
  // Takes the event of this queue that the channel has brought.
  void take_event();

 private:
  void give_back(std::uint32_t entries);
  void take_returns();

  const Rail& rail_;
  std::mutex mutex_;  // guards the budget: connections are made on their callers' threads
  QueueBudget budget_;
  std::uint32_t returned_ = 0;
  std::atomic<bool> has_returns_{false};
  Cq cq_;
  bool armed_ = false;   // no event has come since arm(); to ask again would be a system call for nothing
  unsigned events_ = 0;  // how many were seen; they must be acknowledged before the queue can go
};

}  // namespace bps::transport::rdma

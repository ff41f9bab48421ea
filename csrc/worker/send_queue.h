// SPDX-License-Identifier: Apache-2.0
// Queues the transfers that a worker loop has to send to one server, most urgent first.
//
// Entries are transfers, not partitions: one entry walks through all partitions that an operation has for this server,
// so queueing costs O(log operations) once per operation. A more urgent operation overtakes between two partitions.
// Belongs to the loop's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "worker/transfer.h"

namespace bps::worker {

class SendQueue {
 public:
  void add(Transfer* transfer) {
    heap_.push_back(transfer);
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  bool empty() const { return heap_.empty(); }
  Transfer* top() const { return heap_.front(); }
  void pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    heap_.pop_back();
  }
  // Returns the most urgent transfer that `may` accepts, or nullptr. Looks at all.
  Transfer* find(auto may) const {
    Transfer* found = nullptr;
    for (Transfer* one : heap_) {
      if ((found == nullptr || later(found, one)) && may(*one)) found = one;
    }
    return found;
  }
  // Takes a transfer out, if it is there.
  void remove(const Transfer* transfer) {
    if (!heap_.empty() && transfer == top()) return pop();
    if (std::erase(heap_, transfer) > 0) std::make_heap(heap_.begin(), heap_.end(), later);
  }
  // Returns all transfers, in no order.
  const std::vector<Transfer*>& all() const { return heap_; }
  // Takes out everything, for a server that is gone.
  std::vector<Transfer*> take_all() { return std::exchange(heap_, {}); }

  // Limits the bytes that are sent before the loop looks at what has come. The worker loop sets it once.
  std::uint64_t most_per_turn = ~std::uint64_t{0};
  // This is the transfer that waits for another staging buffer, which the loop adds after the batch. It may have left
  // the queue. The sender sets this and clears it; Admission clears it when no buffer can be made.
  const Transfer* needs_buffer = nullptr;

 private:
  static bool later(const Transfer* a, const Transfer* b) {
    if (a->priority != b->priority) return a->priority < b->priority;
    return a->sequence > b->sequence;
  }
  std::vector<Transfer*> heap_;
};

}  // namespace bps::worker

// SPDX-License-Identifier: Apache-2.0
// What a worker loop has to send to one server, most urgent first: step 3 of the walk.
//
// Entries are operations, not partitions: one entry walks through all partitions that an operation has for this server,
// so queueing costs O(log operations) once per operation. A more urgent operation overtakes between two partitions.
#pragma once

#include <algorithm>
#include <vector>

#include "worker/operation.h"

namespace bps::worker {

class SendQueue {
 public:
  void add(Operation::Cursor* cursor) {
    heap_.push_back(cursor);
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  bool empty() const { return heap_.empty(); }
  Operation::Cursor* top() const { return heap_.front(); }
  void pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    heap_.pop_back();
  }
  // Takes out one operation's, if it is there: for one that is cancelled.
  void remove(const Operation::Cursor* cursor) {
    if (std::erase(heap_, cursor) > 0) std::make_heap(heap_.begin(), heap_.end(), later);
  }
  // Takes out everything, for a server that is gone.
  std::vector<Operation::Cursor*> take_all() { return std::exchange(heap_, {}); }

 private:
  static bool later(const Operation::Cursor* a, const Operation::Cursor* b) {
    const Operation& x = *a->operation;
    const Operation& y = *b->operation;
    if (x.request.priority != y.request.priority) return x.request.priority < y.request.priority;
    return x.sequence > y.sequence;
  }
  std::vector<Operation::Cursor*> heap_;
};

}  // namespace bps::worker

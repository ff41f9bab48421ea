// SPDX-License-Identifier: Apache-2.0
// Keeps the operations whose deadline a loop watches. They stay alive for as long as the loops may touch them.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "worker/operation.h"

namespace bps::worker {

class WatchedOperations {
 public:
  // This takes constant time on average: the list is walked when it has doubled, and by the deadlines' timer.
  void add(std::shared_ptr<Operation> operation) {
    if (std::exchange(operation->is_watched, true)) return;  // it is in the list since an earlier round
    operations_.push_back(std::move(operation));
    if (operations_.size() >= purge_at_) purge();
  }
  void purge() {
    std::erase_if(operations_, [](const auto& operation) {
      if (!operation->is_over()) return false;
      operation->is_watched = false;
      return true;
    });
    purge_at_ = std::max<std::size_t>(64, 2 * operations_.size());
  }
  // Returns the first operation, in the order of calls, that is neither done nor failing, or null.
  const Operation* first() const {
    const Operation* first = nullptr;
    for (const auto& one : operations_) {
      if (one->is_done() || one->is_failing()) continue;
      if (first == nullptr || one->sequence < first->sequence) first = one.get();
    }
    return first;
  }
  auto begin() const { return operations_.begin(); }
  auto end() const { return operations_.end(); }

 private:
  std::vector<std::shared_ptr<Operation>> operations_;
  std::size_t purge_at_ = 64;
};

}  // namespace bps::worker

// SPDX-License-Identifier: Apache-2.0
// Finds the operation that this rank has waited for longest, which the scheduler compares with those of other ranks
// (van/late_rounds.h). Any thread may call it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "van/messages.h"
#include "worker/operation.h"

namespace bps::worker {

class LateRounds {
 public:
  // To be called by each loop at regular intervals, with the first operation that it watches and that is not done, or
  // null.
  void note(const void* loop, const Operation* first) {
    const std::lock_guard lock(mutex_);
    if (first == nullptr) {
      firsts_.erase(loop);
      return;
    }
    const auto [known, is_new] = firsts_.try_emplace(loop);
    known->second.is_late = !is_new && known->second.sequence == first->sequence;
    known->second.sequence = first->sequence;
    known->second.round = {first->tensor->group->id, first->tensor->id, first->round, first->request.kind};
  }
  // Returns the first operation of all loops, once, if it has been the first for a whole interval.
  std::optional<van::LateRound> take() {
    const std::lock_guard lock(mutex_);
    const auto first = std::ranges::min_element(firsts_, {}, [](const auto& one) { return one.second.sequence; });
    if (first == firsts_.end() || !first->second.is_late) return std::nullopt;
    const std::uint64_t sequence = first->second.sequence;
    if (std::exchange(told_, sequence) == sequence) return std::nullopt;
    return first->second.round;
  }

 private:
  struct First {
    std::uint64_t sequence = 0;
    van::LateRound round;
    bool is_late = false;
  };
  std::mutex mutex_;
  std::map<const void*, First> firsts_;  // by loop
  std::optional<std::uint64_t> told_;
};

}  // namespace bps::worker

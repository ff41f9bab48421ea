// SPDX-License-Identifier: Apache-2.0
// Keeps the round that each rank waits for once that takes a while, and finds ranks that wait in one round for
// operations of different kinds. Servers find that out as well where pushes of both meet. But kinds cut a tensor in
// different ways, so that the pushes may meet nowhere, and each rank would wait for the other until its deadline.
//
// Belongs to the scheduler's thread. It keeps one round for each rank, and some that failed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "tensor/operation_names.h"
#include "van/messages.h"

namespace bps::van {

class LateRounds {
 public:
  struct Difference {
    LateRound round;  // its kind says nothing
    tensor::Caller one;
    tensor::Caller other;
  };
  struct Found {
    Difference difference;
    bool is_new;  // all ranks of the group are to be told; false: only this one
  };

  // Notes what the rank waits for now. Returns a difference where ranks wait, or have waited, in this round for
  // operations of different kinds.
  std::optional<Found> note(std::uint32_t rank, const LateRound& late) {
    LateRound least = late, most = late;
    least.kind = tensor::OperationKind{};
    most.kind = tensor::OperationKind::kWriteFeedback;
    const auto [latest, is_first] = latest_.try_emplace(rank, late);
    if (!is_first) waiting_.erase({std::exchange(latest->second, late), rank});
    const auto known = std::ranges::find(failed_, least, &Difference::round);
    if (known != failed_.end()) return Found{*known, false};
    // The others of this round stand together, and are of one kind.
    const auto other = waiting_.lower_bound({least, 0});
    const bool differs = other != waiting_.end() && other->first <= most && other->first.kind != late.kind;
    if (differs) {
      if (failed_.size() == kMostFailed) failed_.pop_front();
      failed_.push_back({least, {other->second, other->first.kind}, {rank, late.kind}});
    }
    waiting_.emplace(late, rank);
    return differs ? std::optional(Found{failed_.back(), true}) : std::nullopt;
  }

 private:
  static constexpr std::size_t kMostFailed = 64;  // rounds that are remembered for ranks that come late

  std::unordered_map<std::uint32_t, LateRound> latest_;  // by rank
  std::set<std::pair<LateRound, std::uint32_t>> waiting_;
  std::deque<Difference> failed_;  // rounds in which kinds differ, the latest last
};

}  // namespace bps::van

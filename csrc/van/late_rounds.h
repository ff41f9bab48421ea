// SPDX-License-Identifier: Apache-2.0
// The round that each rank waits for, once that takes a while, and which ranks wait in one round for operations of
// different kinds. Servers find that out as well where pushes of both meet; but kinds cut a tensor in different ways,
// so that they may meet nowhere, and each rank would wait for the other until its deadline.
//
// Belongs to the scheduler's thread. Memory: one round for each rank.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
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
    tensor::Caller other;
    bool is_new;  // nobody has found it before: all that wait in this round are to be told, and else only this rank
  };

  // The rank waits for this now. Tells if another one waits in the same round for an operation of another kind.
  std::optional<Difference> note(std::uint32_t rank, const LateRound& late) {
    const auto [latest, is_first] = latest_.try_emplace(rank, late);
    if (!is_first) waiting_.erase({std::exchange(latest->second, late), rank});
    // The others of this round stand together, in the order of their kinds.
    LateRound least = late, most = late;
    least.kind = tensor::OperationKind{};
    most.kind = tensor::OperationKind::kWriteFeedback;
    const auto begin = waiting_.lower_bound({least, 0});
    const auto end = waiting_.upper_bound({most, std::numeric_limits<std::uint32_t>::max()});
    std::optional<Difference> found;
    if (begin != end) {
      const auto last = std::prev(end);
      const auto& [round, other] = begin->first.kind != late.kind ? *begin : *last;
      if (round.kind != late.kind) found = {{other, round.kind}, begin->first.kind == last->first.kind};
    }
    waiting_.emplace(late, rank);
    return found;
  }

 private:
  std::unordered_map<std::uint32_t, LateRound> latest_;  // by rank
  std::set<std::pair<LateRound, std::uint32_t>> waiting_;
};

}  // namespace bps::van

// SPDX-License-Identifier: Apache-2.0
// A partition that this server keeps between rounds, for asynchronous training: weights, to which ranks add what they
// have changed, and which each of them gets back at once, with what others have added meanwhile.
//
// A rank may be bounded in how many additions it is ahead of the slowest one: then it is answered when the others have
// caught up. Ranks that are gone are not waited for. A rank that does not know whether its latest addition has arrived
// sends it again: it is added if it was not. Threading: the server loop's.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/dtype.h"

namespace bps::server {

struct StoredPartition {
  Dtype dtype{};
  std::vector<std::byte> bytes;
  std::uint64_t counted = 0;             // in MemoryShares
  std::vector<std::uint32_t> ranks;      // these may add
  std::vector<std::uint64_t> additions;  // of each of them
  // The round in which the latest of them was sent first, plus one: so that one that failed for its rank, and is sent
  // again, is not added twice.
  std::vector<std::uint64_t> latest;
  std::vector<std::uint32_t> held;  // rounds, by their tokens, that others must catch up with

  // The index of a rank among those that may add, or the number of them.
  std::size_t index_of(std::uint32_t rank) const {
    std::size_t index = 0;
    while (index < ranks.size() && ranks[index] != rank) ++index;
    return index;
  }
  // A rank with so many additions need not wait. `most_ahead`: as in tensor::PushHeader::place.
  bool may_go_on(std::uint64_t count, std::uint32_t most_ahead,
                 const std::function<bool(std::uint32_t)>& is_gone) const {
    if (most_ahead == 0) return true;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      if (additions[i] + most_ahead <= count && !is_gone(ranks[i])) return false;
    }
    return true;
  }
};

}  // namespace bps::server

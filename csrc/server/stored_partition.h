// SPDX-License-Identifier: Apache-2.0
// Describes a partition that this server keeps between rounds, for asynchronous training. It holds weights. Ranks add
// to them what they have changed, and each rank gets them back at once, with what others have added meanwhile.
//
// There may be a bound of how many additions a rank is ahead of the slowest one. A rank beyond it is answered when the
// others have caught up. Ranks that are gone are not waited for. A rank that does not know whether its latest addition
// has arrived sends it again, and it is added if it was not. Belongs to the server loop's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/dtype.h"

namespace bps::server {

struct StoredPartition {
  Dtype dtype{};
  std::vector<std::byte> bytes;
  std::uint64_t counted = 0;             // bytes that are counted in MemoryShares
  std::vector<std::uint32_t> ranks;      // those that may add
  std::vector<std::uint64_t> additions;  // by index in `ranks`: how many it has made
  // By index in `ranks`: the round in which its latest addition was sent first, plus one. So an addition that failed
  // for its rank, and is sent again, is not added twice.
  std::vector<std::uint64_t> latest;
  std::vector<std::uint32_t> held;  // tokens of rounds that others must catch up with

  // Returns the index of a rank among those that may add, or their number where it may not.
  std::size_t index_of(std::uint32_t rank) const {
    std::size_t index = 0;
    while (index < ranks.size() && ranks[index] != rank) ++index;
    return index;
  }
  // Returns true when a rank with so many additions need not wait. `most_ahead` is as in tensor::PushHeader::place.
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

// SPDX-License-Identifier: Apache-2.0
// The answers of a session that have been posted in two phases, and that its worker has not said to have. Threading:
// one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>

#include "server/round.h"

namespace bps::server {

struct Landing {
  std::uint32_t immediate;
  Round* round;
  std::uint32_t contributor;
};

class Landings {
 public:
  void expect(Round& round, const Arrival& arrival) {
    all_.push_back({arrival.immediate, &round, static_cast<std::uint32_t>(&arrival - round.arrivals.data())});
  }
  // Returns nothing for an immediate that is not expected. Answers land in the order in which they were posted, but for
  // those of several connections.
  std::optional<Landing> take(std::uint32_t immediate) {
    const auto found = std::ranges::find(all_, immediate, &Landing::immediate);
    if (found == all_.end()) return std::nullopt;
    const Landing landing = *found;
    all_.erase(found);
    return landing;
  }
  void forget(const Round& round) {
    std::erase_if(all_, [&](const Landing& one) { return one.round == &round; });
  }

 private:
  std::deque<Landing> all_;
};

}  // namespace bps::server

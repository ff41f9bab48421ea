// SPDX-License-Identifier: Apache-2.0
// Numbers the loops of all servers, those of server 0 first. Servers may run different numbers of loops.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "van/membership.h"

namespace bps::van {

class ServerPlaces {
 public:
  ServerPlaces() : first_{0, 1} {}  // one server with one loop
  explicit ServerPlaces(const Membership& members) : first_{0} {
    for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
      first_.push_back(first_.back() + members.server(rank)->server_loops);
    }
  }
  std::size_t count() const { return first_.back(); }
  std::size_t first(std::uint32_t server) const { return first_[server]; }
  std::size_t loops(std::uint32_t server) const { return first_[server + 1] - first_[server]; }
  // Returns the server to whose loop the place belongs.
  std::uint32_t server_of(std::size_t place) const {
    return static_cast<std::uint32_t>(std::ranges::upper_bound(first_, place) - first_.begin() - 1);
  }

 private:
  std::vector<std::size_t> first_;  // the first place of each server, then the number of all places
};

}  // namespace bps::van

// SPDX-License-Identifier: Apache-2.0
// Which of the data connections to a server takes the next batch, so that each carries bytes in proportion to the speed
// of its rail.
//
// Each connection has a clock that advances by the time its bytes take on its rail; the one that is furthest behind is
// next. A connection that had no room for a batch is charged for it all the same: if it cannot keep up, the others take
// its part. Threading: the loop's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace bps::worker {

class RailShares {
 public:
  RailShares() = default;
  // Connections over rails of these speeds. If one is unknown (0), all count the same.
  explicit RailShares(std::span<const std::uint32_t> speeds) {
    const bool known = std::ranges::find(speeds, 0U) == speeds.end();
    const std::uint64_t fastest = speeds.empty() ? 0 : *std::ranges::max_element(speeds);
    for (const std::uint32_t speed : speeds) {
      connections_.push_back({.clock = 0, .per_byte = known ? fastest * kUnit / speed : kUnit});
    }
  }

  std::size_t next() const {
    std::size_t best = 0;
    for (std::size_t i = 1; i < connections_.size(); ++i) {
      if (connections_[i].clock < connections_[best].clock) best = i;
    }
    return best;
  }
  void charge(std::size_t connection, std::uint64_t bytes) {
    std::uint64_t& clock = connections_[connection].clock;
    clock += (bytes + kPerBatch) * connections_[connection].per_byte;
    if (clock >= kMostClock) rebase();
  }

 private:
  static constexpr std::uint64_t kUnit = 16;      // of a clock, per byte on the fastest rail: ratios like 2.5 matter
  static constexpr std::uint64_t kPerBatch = 64;  // so that batches without payload take turns, too
  static constexpr std::uint64_t kMostClock = std::uint64_t{1} << 60;

  struct Connection {
    std::uint64_t clock = 0;
    std::uint64_t per_byte = kUnit;
  };

  void rebase() {
    const std::uint64_t behind = std::ranges::min(connections_, {}, &Connection::clock).clock;
    for (Connection& connection : connections_) connection.clock -= behind;
  }

  std::vector<Connection> connections_;
};

}  // namespace bps::worker

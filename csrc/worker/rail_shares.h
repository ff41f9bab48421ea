// SPDX-License-Identifier: Apache-2.0
// Chooses the data connection to a server that takes the next batch, so that each carries bytes in proportion to the
// speed of its rail.
//
// Each connection has a clock that advances by the time its bytes take on its rail; the one that is furthest behind is
// next. A connection that had no room for a batch is charged for it all the same: if it cannot keep up, the others take
// its part. Drivers of virtual machines' interfaces, for one, do not tell the speed, or tell a wrong one: where what
// the network carries differs much from what the rails promise, it counts instead. Belongs to the loop's thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transport/data_endpoint.h"

namespace bps::worker {

class RailShares {
 public:
  RailShares() = default;
  // Makes connections over rails of these speeds. If one is unknown (0), all count the same.
  explicit RailShares(std::span<const std::uint32_t> speeds) {
    const bool known = std::ranges::find(speeds, 0U) == speeds.end();
    const std::uint64_t fastest = speeds.empty() ? 0 : *std::ranges::max_element(speeds);
    for (const std::uint32_t speed : speeds) {
      const std::uint64_t per_byte = known ? fastest * kUnit / speed : kUnit;
      connections_.push_back({.clock = 0, .per_byte = per_byte, .promised = per_byte});
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
  // Notes what a connection has carried lately. To be called now and then.
  void note(std::size_t connection, const transport::MeasuredRate& found) {
    std::uint64_t& rate = connections_[connection].rate;
    if (found.bytes_per_s == 0 || (found.at_least && found.bytes_per_s <= rate)) return;
    if (rate == 0 && found.at_least) return;  // a small write is no measure
    rate = rate == 0 ? found.bytes_per_s : (3 * rate + found.bytes_per_s) / 4;
  }
  // Shares bytes by the rates that were noted, where the rails do not carry what they promise in proportion.
  void follow() {
    const auto unknown = [](const Connection& one) { return one.rate == 0; };
    if (connections_.empty() || std::ranges::any_of(connections_, unknown)) return;
    const auto kept = [](const Connection& one) { return one.rate * one.promised; };  // the same for all, ideally
    const auto [least, most] = std::ranges::minmax(connections_, {}, kept);
    const bool as_promised = kept(most) < kept(least) + kept(least) / 2;
    const std::uint64_t fastest = std::ranges::max(connections_, {}, &Connection::rate).rate;
    for (Connection& one : connections_) {
      one.per_byte = as_promised ? one.promised : std::min(fastest * kUnit / one.rate, kUnit * kLeastShare);
    }
  }

 private:
  static constexpr std::uint64_t kUnit = 16;        // of a clock, per byte on the fastest rail: ratios like 2.5 matter
  static constexpr std::uint64_t kPerBatch = 64;    // so that batches without payload take turns, too
  static constexpr std::uint64_t kLeastShare = 64;  // 1/64 of the fastest one's, so that it is measured again
  static constexpr std::uint64_t kMostClock = std::uint64_t{1} << 60;

  struct Connection {
    std::uint64_t clock = 0;
    std::uint64_t per_byte = kUnit;
    std::uint64_t promised = kUnit;  // per_byte, by what the rails themselves tell
    std::uint64_t rate = 0;          // bytes per second, measured; 0: not yet
  };

  void rebase() {
    const std::uint64_t behind = std::ranges::min(connections_, {}, &Connection::clock).clock;
    for (Connection& connection : connections_) connection.clock -= behind;
  }

  std::vector<Connection> connections_;
};

}  // namespace bps::worker

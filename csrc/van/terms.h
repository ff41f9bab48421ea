// SPDX-License-Identifier: Apache-2.0
// The settings that must be alike for all members of a job. Each worker finds out by itself which server sums a piece
// of a tensor: workers that differ would wait for each other. The scheduler refuses the one that comes later.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace bps::van {

struct Terms {
  std::uint32_t min_workers = 0;  // BPS_MIN_WORKERS: of servers and of the scheduler, too
  // The rest is of workers alone; the placement of others is empty.
  std::string placement{};
  std::string key_hash{};
  std::uint64_t built_in_coefficient = 0;
  std::uint64_t mixed_bound = 0;
  std::uint64_t min_partition_bytes = 0;
  bool async = false;
  std::uint32_t placement_seconds = 0;
  bool device_route = false;
  bool survives_servers = false;  // BPS_SERVER_FAILOVER, and what it depends on

  static constexpr std::size_t kMostWordBytes = 32;
  static constexpr void fields(auto& io, auto& m) {
    io(m.min_workers);
    io.bounded(m.placement, kMostWordBytes);
    io.bounded(m.key_hash, kMostWordBytes);
    io(m.built_in_coefficient, m.mixed_bound, m.min_partition_bytes, m.async, m.placement_seconds, m.device_route);
    io(m.survives_servers);
  }
  auto operator<=>(const Terms&) const = default;
  bool is_of_worker() const { return !placement.empty(); }
};

// "BPS_PLACEMENT is mixed here, and auto on ": the first setting that differs. Nothing: both fit.
std::optional<std::string> difference(const Terms& mine, const Terms& others);

}  // namespace bps::van

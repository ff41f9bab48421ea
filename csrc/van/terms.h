// SPDX-License-Identifier: Apache-2.0
// Holds the settings that must be alike for all members of a job. Each worker finds out by itself which server sums a
// partition, so workers that differ would wait for each other. Of two that differ the scheduler refuses the later one.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace bps::van {

struct Terms {
  std::uint32_t min_workers = 0;  // BPS_MIN_WORKERS; servers and the scheduler have it, too
  // Only workers have the rest; the placement of others is empty.
  std::string placement{};
  std::string key_hash{};
  std::uint64_t built_in_coefficient = 0;
  std::uint64_t mixed_bound = 0;
  std::uint64_t min_partition_bytes = 0;
  bool async = false;
  std::uint32_t placement_seconds = 0;
  bool device_route = false;
  bool gpu_host_sum = false;
  bool survives_servers = false;  // BPS_SERVER_FAILOVER, and what it depends on

  static constexpr std::size_t kMostWordBytes = 32;
  static constexpr void fields(auto& io, auto& m) {
    io(m.min_workers);
    io.bounded(m.placement, kMostWordBytes);
    io.bounded(m.key_hash, kMostWordBytes);
    io(m.built_in_coefficient, m.mixed_bound, m.min_partition_bytes, m.async, m.placement_seconds, m.device_route);
    io(m.gpu_host_sum, m.survives_servers);
  }
  auto operator<=>(const Terms&) const = default;
  bool is_of_worker() const { return !placement.empty(); }
};

// Tells people the first setting that differs: "BPS_PLACEMENT is mixed here, and auto on ". Returns nothing where both
// fit.
std::optional<std::string> difference(const Terms& mine, const Terms& others);

}  // namespace bps::van

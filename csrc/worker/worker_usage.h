// SPDX-License-Identifier: Apache-2.0
// Tells which resources a worker loop uses at this moment, for gauges.
#pragma once

#include <cstdint>
#include <vector>

namespace bps::worker {

class Connections;
class WatchedOperations;

struct WorkerUsage {
  struct Server {
    std::uint32_t node = 0;
    bool needs_slots = false;       // false: it reads memory in place
    std::uint64_t small_slots = 0;  // landing slots that may be filled now, which are the credits
    std::uint64_t large_slots = 0;
    std::uint64_t partitions_in_flight = 0;
    std::uint64_t bytes_in_flight = 0;
  };
  std::vector<Server> servers;
  std::uint64_t registered_bytes = 0;
  // Counts the operations whose deadline this loop watches. Each operation has one such loop.
  std::uint64_t open_operations = 0;
  double oldest_s = 0;  // since the start of the oldest of them
};

WorkerUsage usage_of(const Connections& connections, const WatchedOperations& watched);

}  // namespace bps::worker

// SPDX-License-Identifier: Apache-2.0
// WorkerLoop::usage().
#include <algorithm>
#include <chrono>

#include "worker/worker_loop.h"

namespace bps::worker {
WorkerUsage WorkerLoop::usage() const {
  WorkerUsage usage;
  for (const auto& server : servers_) {
    if (!server || server->is_closed()) continue;
    usage.servers.push_back({.node = server->node,
                             .needs_slots = server->needs_slots(),
                             .small_slots = server->slots.small(),
                             .large_slots = server->slots.large(),
                             .partitions_in_flight = server->outstanding.partitions(),
                             .bytes_in_flight = server->outstanding.bytes()});
  }
  for (const auto& memory : memory_) usage.registered_bytes += memory->registered_bytes();
  const Clock::time_point now = Clock::now();
  for (const auto& operation : watched_) {
    if (operation->over()) continue;
    ++usage.open_operations;
    const std::chrono::duration<double> age = operation->age(now).value_or(Duration::zero());
    usage.oldest_s = std::max(usage.oldest_s, age.count());
  }
  return usage;
}

}  // namespace bps::worker

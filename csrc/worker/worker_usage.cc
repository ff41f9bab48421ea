// SPDX-License-Identifier: Apache-2.0
#include "worker/worker_usage.h"

#include <algorithm>
#include <chrono>

#include "worker/connections.h"
#include "worker/watched_operations.h"

namespace bps::worker {

WorkerUsage usage_of(const Connections& connections, const WatchedOperations& watched) {
  WorkerUsage usage;
  for (const ServerConnection* server : connections.all()) {
    if (server->is_closed()) continue;
    usage.servers.push_back({.node = server->node,
                             .needs_slots = server->needs_slots(),
                             .small_slots = server->slots.small(),
                             .large_slots = server->slots.large(),
                             .partitions_in_flight = server->outstanding.partitions(),
                             .bytes_in_flight = server->outstanding.bytes()});
  }
  usage.registered_bytes = connections.registered_bytes();
  const Clock::time_point now = Clock::now();
  for (const auto& operation : watched) {
    if (operation->is_over()) continue;
    ++usage.open_operations;
    const std::chrono::duration<double> age = operation->age(now).value_or(Duration::zero());
    usage.oldest_s = std::max(usage.oldest_s, age.count());
  }
  return usage;
}

}  // namespace bps::worker

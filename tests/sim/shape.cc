// SPDX-License-Identifier: Apache-2.0
#include "shape.h"

#include <algorithm>

namespace bps::sim {

using std::chrono::microseconds;
using std::chrono::milliseconds;

Shape Shape::draw(Random& random) {
  Shape made;
  made.workers = 2 + static_cast<std::uint32_t>(random.below(3));
  made.dedicated = random.chance(0.7);
  made.servers = made.dedicated ? 1 + static_cast<std::uint32_t>(random.below(3)) : made.workers;
  made.least = random.chance(0.3) ? 0 : 1;
  made.steps = 2 + static_cast<std::uint32_t>(random.below(4));
  made.open_calls = 1 + static_cast<std::uint32_t>(random.below(4));
  constexpr std::uint64_t kPartitions[] = {512, 4096, 12288};  // the last one needs a large slot
  made.partition_bytes = random.one_of(kPartitions);
  constexpr tensor::OperationKind kKinds[] = {tensor::OperationKind::kPushPull, tensor::OperationKind::kPushPull,
                                              tensor::OperationKind::kReduceScatter, tensor::OperationKind::kAllGather,
                                              tensor::OperationKind::kBroadcast};
  const std::uint64_t tensors = 1 + random.below(5);
  for (std::uint64_t i = 0; i < tensors; ++i) {
    made.tensors.push_back({random.one_of(kKinds), 1 + random.below(5 * made.partition_bytes / 4), random.chance(0.6)});
  }
  constexpr std::uint64_t kCredits[] = {0, 1, 3};  // partitions under way to one server
  made.credit = random.one_of(kCredits) * made.partition_bytes * made.servers;
  made.window = 1 + static_cast<std::uint32_t>(random.below(4));
  made.slot_memory = random.chance(0.5) ? 100'000 * made.workers : 0;  // few small slots, or many
  made.data_connections = 1 + random.below(2);
  made.hasty = random.chance(0.3) ? 0.15 : 0;
  made.faults = random.chance(0.25) ? 0 : 1 + static_cast<std::uint32_t>(random.below(4));
  Conditions& network = made.conditions;
  network.delay = random.between(microseconds(1), microseconds(200));
  network.jitter = random.between(microseconds(1), milliseconds(1));
  constexpr double kRates[] = {1e7, 1e8, 1e9};
  network.bytes_per_s = random.one_of(kRates);
  network.window = 1 + random.below(16);
  network.refuse = random.chance(0.5) ? 0.2 : 0;
  network.patience = random.between(milliseconds(200), milliseconds(3000));
  network.by_process = random.chance(0.5);
  made.failover = made.dedicated && made.least > 0 && random.chance(0.6);
  if (made.failover) {
    made.servers = 1 + static_cast<std::uint32_t>(random.below(4));
  }
  // Ranks that wait for one call before they make another have to agree on the order.
  if (made.open_calls >= made.tensors.size() && random.chance(0.4)) made.passes = 2;
  if (made.least > 0 && random.chance(0.25)) made.scheduler_deaths = 1 + static_cast<std::uint32_t>(random.below(2));
  if (random.chance(0.5)) made.draw_hosts(random);
  made.draw_shifts(random);  // from a copy: everything else is as without them
  return made;
}

// One to three hosts with workers; servers of their own are on one of these, or not. Sums on hosts need two.
void Shape::draw_hosts(Random& random) {
  const std::uint32_t more = static_cast<std::uint32_t>(random.below(3));
  if (!dedicated) servers += more;
  credit = credit / workers * (workers + more);
  workers += more;
  const std::uint64_t hosts = 1 + random.below(3);
  for (std::uint32_t i = 0; i < processes(); ++i) {
    host_of.push_back(static_cast<std::uint32_t>(random.below(is_worker(i) ? hosts : hosts + 1)));
  }
  host_sums = random.chance(0.8);
  conditions.maps_all = random.chance(0.5);
  conditions.may_fence = random.chance(0.7);
}

// Where the real code lets servers get other weights: see van::can_shift(). Hosts get links that differ much, so that
// partitions move.
void Shape::draw_shifts(Random random) {
  const bool on_one_host = !host_of.empty() && std::ranges::count(host_of, host_of.front()) == std::ssize(host_of);
  if (least > 0 || servers < 2 || on_one_host || random.chance(0.2)) return;
  if (host_of.empty()) {
    for (std::uint32_t i = 0; i < processes(); ++i) host_of.push_back(i);
  }
  constexpr std::uint64_t kLinks[] = {100'000'000, 1'000'000'000, 10'000'000'000};
  const std::uint64_t count = 1 + random.below(6);
  for (std::uint64_t i = 0; i < count; ++i) {
    ShiftShape& shift = shifts.emplace_back();
    shift.at = random.between(Duration::zero(), milliseconds(60));
    for (std::uint32_t node = 0; node < processes(); ++node) shift.links.push_back(random.one_of(kLinks));
  }
}

}  // namespace bps::sim

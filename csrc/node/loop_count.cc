// SPDX-License-Identifier: Apache-2.0
#include "node/loop_count.h"

#include <algorithm>
#include <numeric>

namespace bps::node {
namespace {

constexpr std::uint64_t kOneLoop_mbit = 10'000;

}  // namespace

std::size_t default_worker_loops(const LoopFacts& facts) {
  if (facts.shares_memory || facts.has_rdma) return 1;
  const bool knows_speeds = std::ranges::find(facts.interfaces, 0U) == facts.interfaces.end();
  const auto all = std::accumulate(facts.interfaces.begin(), facts.interfaces.end(), std::uint64_t{0});
  return knows_speeds && all <= kOneLoop_mbit ? 1 : 2;
}

}  // namespace bps::node

// SPDX-License-Identifier: Apache-2.0
// The job of tests/model/failover.pml, simulated: two workers make two steps of one push_pull of two partitions, by two
// servers of which one may die. What happens is recorded as the actions of that model.
#pragma once

#include <cstdint>
#include <vector>

namespace bps::sim {

// As ACTION() in failover.pml numbers them. Empty: the server died before the workers were at work.
std::vector<std::uint32_t> record_failover(std::uint64_t seed);

}  // namespace bps::sim

// SPDX-License-Identifier: Apache-2.0
// The job of tests/model/scheduler.pml, simulated: two workers commit two steps, while a view may end because a server
// dies, and the scheduler dies up to twice. What happens until both have committed is recorded as that model's actions.
#pragma once

#include <cstdint>
#include <vector>

namespace bps::sim {

// As ACTION() in scheduler.pml numbers them. Empty: the workers did not come so far.
std::vector<std::uint32_t> record_scheduler(std::uint64_t seed);

}  // namespace bps::sim

// SPDX-License-Identifier: Apache-2.0
// Reports on a pool and its jobs: as JSON to its users, and as metrics for Prometheus. These are pure functions, except
// that they ask the kernel about the processes.
#pragma once

#include <cstdint>
#include <string>

#include "core/exposition.h"
#include "pool/jobs.h"

namespace bps::pool {

// Tells `user` how much is taken, and about the jobs of this user, or about all.
std::string list_for(const Jobs& jobs, const std::string& user, bool all);

struct Counters {
  std::uint64_t refused_requests = 0;
  std::uint64_t refused_connections = 0;
};
MetricFamilies pool_families(const Jobs& jobs, const Counters& counters);

}  // namespace bps::pool

// SPDX-License-Identifier: Apache-2.0
// Reports on a pool and its jobs: as JSON to its users, and as metrics for Prometheus. Pure, but for what the kernel
// says of the processes.
#pragma once

#include <cstdint>
#include <string>

#include "core/exposition.h"
#include "pool/jobs.h"

namespace bps::pool {

// To `user`: how much is taken, and of the jobs those of this user, or all.
std::string list_for(const Jobs& jobs, const std::string& user, bool all);

struct Counters {
  std::uint64_t refused_requests = 0;
  std::uint64_t refused_connections = 0;
};
MetricFamilies pool_families(const Jobs& jobs, const Counters& counters);

}  // namespace bps::pool

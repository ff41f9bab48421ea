// SPDX-License-Identifier: Apache-2.0
// Gives the counters of core/metrics.h the names and units of Prometheus. A pure function.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/exposition.h"

namespace bps {

// `counters` are what Counters::list() returns. One that has no name here is left out; a test asserts that none is.
MetricFamilies counter_families(const std::vector<std::pair<std::string, std::uint64_t>>& counters);

}  // namespace bps

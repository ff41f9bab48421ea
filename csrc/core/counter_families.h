// SPDX-License-Identifier: Apache-2.0
// The counters of core/metrics.h under the names and in the units of Prometheus. Threading: pure.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/exposition.h"

namespace bps {

// `counters`: as Counters::list() names them. A counter that has no name here is left out; a test asserts that none is.
MetricFamilies counter_families(const std::vector<std::pair<std::string, std::uint64_t>>& counters);

}  // namespace bps

// SPDX-License-Identifier: Apache-2.0
#include "van/terms.h"

#include <utility>
#include <vector>

namespace bps::van {
namespace {

using Named = std::vector<std::pair<std::string, std::string>>;

Named named(const Terms& terms, bool of_worker) {
  Named all{{"BPS_MIN_WORKERS", std::to_string(terms.min_workers)}};
  if (!of_worker) return all;
  all.insert(all.end(), {{"BPS_PLACEMENT", terms.placement},
                         {"BPS_KEY_HASH_FN", terms.key_hash},
                         {"BPS_BUILT_IN_HASH_COEF", std::to_string(terms.built_in_coefficient)},
                         {"BPS_MIXED_MODE_BOUND", std::to_string(terms.mixed_bound)},
                         {"BPS_MIN_PARTITION_BYTES", std::to_string(terms.min_partition_bytes)},
                         {"BPS_PLACEMENT_SECONDS", std::to_string(terms.placement_seconds)},
                         {"BPS_ASYNC", terms.async ? "1" : "0"},
                         {"BPS_DEVICE_ROUTE", terms.device_route ? "1" : "0"},
                         {"BPS_GPU_HOST_SUM", terms.gpu_host_sum ? "1" : "0"},
                         {"BPS_SERVER_FAILOVER", terms.survives_servers ? "1" : "0"}});
  return all;
}

}  // namespace

std::optional<std::string> difference(const Terms& mine, const Terms& others) {
  const bool of_workers = mine.is_of_worker() && others.is_of_worker();
  const Named here = named(mine, of_workers);
  const Named there = named(others, of_workers);
  for (std::size_t i = 0; i < here.size(); ++i) {
    const auto& [name, value] = here[i];
    if (value != there[i].second) return name + " is " + value + " here, and " + there[i].second + " on ";
  }
  return std::nullopt;
}

}  // namespace bps::van

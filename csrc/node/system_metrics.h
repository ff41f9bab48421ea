// SPDX-License-Identifier: Apache-2.0
// Reads the system's counts of this process, and of the ports of RDMA devices, from /proc and /sys at each call. What
// is not there is left out. Any thread may call these.
#pragma once

#include <string>
#include <vector>

#include "core/exposition.h"

namespace bps::node {

// Returns families under the names that all Prometheus clients use.
MetricFamilies process_families();

struct RdmaPort {
  std::string device;
  unsigned port = 1;
  bool operator==(const RdmaPort&) const = default;
};
// Returns the counters of these ports, for all processes of the host. `root` is /sys/class/infiniband, or a test's.
MetricFamilies rdma_port_families(const std::vector<RdmaPort>& ports,
                                  const std::string& root = "/sys/class/infiniband");

}  // namespace bps::node

// SPDX-License-Identifier: Apache-2.0
// The system's counts of this process, and of the ports of RDMA devices. Read from /proc and /sys at each call; what is
// not there is left out. Threading: any thread.
#pragma once

#include <string>
#include <vector>

#include "core/exposition.h"

namespace bps::node {

// Under the names that all Prometheus clients use.
MetricFamilies process_families();

struct RdmaPort {
  std::string device;
  unsigned port = 1;
  bool operator==(const RdmaPort&) const = default;
};
// The counters of these ports, which count for all processes of the host. `root`: /sys/class/infiniband, or a test's.
MetricFamilies rdma_port_families(const std::vector<RdmaPort>& ports,
                                  const std::string& root = "/sys/class/infiniband");

}  // namespace bps::node

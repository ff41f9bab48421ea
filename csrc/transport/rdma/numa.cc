// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/numa.h"

#include <sched.h>

#include <filesystem>
#include <fstream>
#include <system_error>

namespace bps::transport::rdma {

std::vector<int> bound_numa_nodes() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};
  std::vector<int> bound;
  bool all = true;
  for (int node = 0;; ++node) {
    const std::string folder = "/sys/devices/system/node/node" + std::to_string(node);
    std::error_code none;
    if (!std::filesystem::exists(folder, none)) break;
    bool has_processors = false;
    bool ours = false;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!std::filesystem::exists(folder + "/cpu" + std::to_string(cpu), none)) continue;
      has_processors = true;
      ours = ours || CPU_ISSET(static_cast<std::size_t>(cpu), &allowed);
    }
    if (ours) bound.push_back(node);
    all = all && (ours || !has_processors);
  }
  return all ? std::vector<int>() : bound;
}

int numa_node_of(const std::string& device_path) {
  int node = -1;
  std::ifstream(device_path + "/device/numa_node") >> node;
  return node;
}

}  // namespace bps::transport::rdma

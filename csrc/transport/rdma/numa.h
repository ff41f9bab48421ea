// SPDX-License-Identifier: Apache-2.0
// Where processors and devices lie, as the kernel tells.
#pragma once

#include <string>
#include <vector>

namespace bps::transport::rdma {

// The NUMA nodes of the processors that this process may use; empty when these are all of the machine.
std::vector<int> bound_numa_nodes();
// The node of the card that a device sits on; -1: unknown, or there is only one node.
int numa_node_of(const std::string& device_path);

}  // namespace bps::transport::rdma

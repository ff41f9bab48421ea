// SPDX-License-Identifier: Apache-2.0
// Tells where processors and devices lie, as the kernel says.
#pragma once

#include <string>
#include <vector>

namespace bps::transport::rdma {

// Returns the NUMA nodes of the processors that this process may use; empty when these are all of the machine.
std::vector<int> bound_numa_nodes();
// Returns the node of the card that a device sits on; -1: unknown, or there is only one node.
int numa_node_of(const std::string& device_path);

}  // namespace bps::transport::rdma

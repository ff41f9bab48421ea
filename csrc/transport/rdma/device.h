// SPDX-License-Identifier: Apache-2.0
// The devices of this machine: looking at them, and opening one.
#pragma once

#include <string>
#include <vector>

#include "transport/rdma/rdma.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

// Seconds between two looks of those who hold a device whether it is to be removed.
inline constexpr double kDeviceCheck_s = 1;

// All devices, without those that cannot be opened.
std::vector<RdmaDevice> list_rdma_devices();

// Throws kTransport when there is no such device, or it cannot be opened.
VerbsContext open_rdma_device(const std::string& name);

// The kernel takes a device away by removing it from sysfs first; that is all the notice that some drivers give. They
// then wait for every process to let go of it.
bool is_removed(const ibv_context& device);

// librdmacm keeps a context of its own for each device, which it closes at no time. Puts /dev/null in the place of its
// descriptors, so that a removed device can go; what the library still does with them fails, harmlessly.
void let_go(ibv_context& context_of_library);

}  // namespace bps::transport::rdma

// SPDX-License-Identifier: Apache-2.0
// Lists the RDMA devices of this machine, opens them, and sees when one is removed.
#pragma once

#include <string>
#include <vector>

#include "transport/rdma/rdma.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

// A process that holds a device looks whether it is to be removed at this interval, in seconds.
inline constexpr double kDeviceCheck_s = 1;

// Returns all devices, without those that cannot be opened.
std::vector<RdmaDevice> list_rdma_devices();

// Throws kTransport when there is no such device, or it cannot be opened.
VerbsContext open_rdma_device(const std::string& name);

// Returns true when the kernel takes the device away. It removes the device from sysfs first, which is all the notice
// that some drivers give, and they then wait for every process to let go of it.
bool is_removed(const ibv_context& device);

// Puts /dev/null in the place of the descriptors of librdmacm's context, so that a removed device can go. librdmacm
// keeps a context of its own for each device, and never closes it. Its later use of them fails harmlessly.
void let_go(ibv_context& context_of_library);

}  // namespace bps::transport::rdma

// SPDX-License-Identifier: Apache-2.0
// Finds the network interfaces that this process uses by TCP.
#pragma once

#include <string>
#include <vector>

#include "core/settings.h"
#include "transport/tcp/tcp_rails.h"

namespace bps::node {

// Returns the interfaces that BPS_INTERFACE names, in that order; without it one rail, at local_address(). Peers know
// this host by the address of the first one, which is BPS_NODE_HOST if given. Throws kInvalidArgument when an interface
// does not exist, has no address, or there are more than kMostRails.
std::vector<transport::tcp::TcpRail> find_tcp_rails(const TransportSettings& settings,
                                                    const std::string& scheduler_host);

// Returns Mbit/s, as the driver tells; 0 when it does not know. `folder` is where the kernel shows its interfaces.
std::uint32_t interface_speed(const std::string& interface, const std::string& folder = "/sys/class/net");

// Returns "eth0 10.0.0.1 (25 Gbit/s)", for people.
std::string describe(const transport::tcp::TcpRail& rail);

}  // namespace bps::node

// SPDX-License-Identifier: Apache-2.0
// Describes the TCP ports that a process may listen on, as BPS_PORTS names them for a firewall.
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace bps {

// Both ends belong to the range. Both are 0 where the system chooses a port.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;
  bool operator==(const PortRange&) const = default;
};

// Returns what `listen` does for the first port of the range for which it does not throw kPortTaken. Throws kPortTaken
// when every port is taken.
template <typename Listen>
auto listen_within(const PortRange& ports, Listen listen) {
  for (std::uint32_t port = ports.first; port <= ports.last; ++port) {
    try {
      return listen(static_cast<std::uint16_t>(port));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPortTaken || ports.first == 0) throw;
    }
  }
  throw Error(ErrorCode::kPortTaken,
              "all ports of BPS_PORTS=" + std::to_string(ports.first) + "-" + std::to_string(ports.last) +
                  " are taken on this host",
              "name a larger range: a host needs a port for each of its server processes and interfaces, and one for "
              "the scheduler (ss -ltnp shows who listens)");
}

}  // namespace bps

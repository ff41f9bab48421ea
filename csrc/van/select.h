// Which transport reaches which peer: a pure function of the two nodes and the setting.
//
// The own process is reached by "self" whatever the setting says: there is nothing to transport. Otherwise "auto" takes
// shared memory on one host, then RDMA, then TCP, as far as both sides published an address for it.
#pragma once

#include <string>

#include "van/membership.h"

namespace bps {

// Throws kUnreachable when the forced transport cannot reach the peer, with the reason.
std::string select_transport(const std::string& setting, const Node& from, const Node& to);

const Bytes* address_of(const Node& node, const std::string& transport);

// Equal on processes that can share memory and abstract sockets: the boot and the network namespace.
std::string host_key();

}  // namespace bps

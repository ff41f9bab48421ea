// Which transport reaches which peer: a pure function of the two nodes and the setting.
//
// The own process is reached by "self" whatever the setting says: there is nothing to transport. Otherwise the first of
// the allowed transports for which both sides are equipped.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "van/membership.h"

namespace bps::van {

// The transports that BPS_TRANSPORT allows, best first: "auto" is shm, rdma, tcp; otherwise one or several of these,
// separated by commas. The values of BytePS's DMLC_ENABLE_RDMA are understood too: 1 or ibverbs mean rdma, 0 or zmq all
// but rdma. Throws kInvalidArgument.
std::vector<std::string> allowed_transports(const std::string& setting);

// Throws kUnreachable when none of the allowed transports can reach the peer, with the reason.
std::string select_transport(std::span<const std::string> allowed, const Node& from, const Node& to);

const Bytes* address_of(const Node& node, const std::string& transport);

// Equal on processes that can share memory and abstract sockets: the boot and the network namespace.
std::string host_key();

}  // namespace bps::van

// SPDX-License-Identifier: Apache-2.0
// Chooses the transport that reaches a peer. The choice is a pure function of the two nodes and the setting.
//
// A process reaches itself by kSelf whatever the setting says. It reaches another process by the first of the allowed
// transports that both sides can use.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "transport/kind.h"
#include "van/membership.h"

namespace bps::van {

// Returns the transports that BPS_TRANSPORT allows, best first. "auto" means shm, rdma, tcp; any other setting lists
// one or several of these, separated by commas. The values of BytePS's DMLC_ENABLE_RDMA are understood too: 1 and
// ibverbs mean rdma, 0 and zmq mean all but rdma. Throws kInvalidArgument.
std::vector<transport::Kind> allowed_transports(const std::string& setting);

// Throws kUnreachable, with the reason, when none of the allowed transports can reach the peer.
transport::Kind select_transport(std::span<const transport::Kind> allowed, const Node& from, const Node& to);

// Returns nullptr when the node does not listen by this transport.
const Bytes* address_of(const Node& node, transport::Kind kind);

// Returns true when both are in one network namespace of one machine, so that loopback addresses lead from one to the
// other.
bool share_loopback(const Node& a, const Node& b);

// Returns a text that is equal on processes that can share memory and abstract sockets. It names the boot, the network
// namespace, and what the user tells hosts apart by (BPS_HOST_ID).
std::string host_key(const std::string& host_id);

}  // namespace bps::van

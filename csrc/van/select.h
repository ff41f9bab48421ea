// SPDX-License-Identifier: Apache-2.0
// Chooses the transport that reaches a peer: a pure function of the two nodes and the setting.
//
// A process reaches itself by kSelf whatever the setting says. Another one it reaches by the first of the allowed
// transports that both sides can use.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "transport/kind.h"
#include "van/membership.h"

namespace bps::van {

// The transports that BPS_TRANSPORT allows, best first: "auto" is shm, rdma, tcp; otherwise one or several of these,
// separated by commas. The values of BytePS's DMLC_ENABLE_RDMA are understood too: 1 or ibverbs mean rdma, 0 or zmq all
// but rdma. Throws kInvalidArgument.
std::vector<transport::Kind> allowed_transports(const std::string& setting);

// Throws kUnreachable when none of the allowed transports can reach the peer, with the reason.
transport::Kind select_transport(std::span<const transport::Kind> allowed, const Node& from, const Node& to);

// nullptr when the node does not listen by this transport.
const Bytes* address_of(const Node& node, transport::Kind kind);

// True when both are in one network namespace of one machine, by which loopback addresses lead from one to the other.
bool share_loopback(const Node& a, const Node& b);

// Equal on processes that can share memory and abstract sockets: the boot and the network namespace, and what the user
// tells them apart by (BPS_HOST_ID).
std::string host_key(const std::string& host_id);

}  // namespace bps::van

// SPDX-License-Identifier: Apache-2.0
// Makes the connection manager's events and errors easy to handle.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "core/bytes.h"
#include "core/error.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

// Holds one event, copied and acknowledged: an identifier can be destroyed only when all its events are acknowledged.
struct CmEvent {
  rdma_cm_event_type type{};
  int status = 0;
  rdma_cm_id* id = nullptr;
  rdma_cm_id* listener = nullptr;  // the listener that a request came to; else null
  Bytes private_data;
};

// Makes a channel that never blocks. Throws kUnreachable where the kernel has no connection manager.
CmChannel make_cm_channel();
CmId make_cm_id(rdma_event_channel* channel);
// Returns false when there is no event.
bool next_event(rdma_event_channel* channel, CmEvent& event);
// Tells what happened, and what it may mean.
std::string in_words(const CmEvent& event);

// Holds a numeric address of an RDMA network, IPv4 or IPv6. A link-local address needs the interface.
class CmAddress {
 public:
  CmAddress(const std::string& host, std::uint16_t port, const std::string& interface);
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage_); }

 private:
  sockaddr_storage storage_{};
};

}  // namespace bps::transport::rdma

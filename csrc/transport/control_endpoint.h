// SPDX-License-Identifier: Apache-2.0
// Defines the control plane of a connection: it carries short messages in order, never payload. Belongs to the loop.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/error.h"
#include "transport/endpoint.h"

namespace bps::transport {

inline constexpr std::size_t kMaxMessage = 1 << 16;

class ControlEndpoint;

// The user of a control endpoint implements this. It is called on the transport's thread, and must not block.
class ControlSink {
 public:
  virtual void on_message(ControlEndpoint& from, std::span<const std::byte> message) = 0;
  virtual void on_lost(Endpoint& peer, const std::string& why) = 0;

 protected:
  ~ControlSink() = default;
};

class ControlEndpoint : public Endpoint {
 public:
  // Sends a copy of the message. Messages of one endpoint are never reordered. Returns kPeerLost when the peer is lost,
  // and kProtocol when the message is longer than kMaxMessage.
  virtual Status send(std::span<const std::byte> message) = 0;

  ControlSink* sink = nullptr;  // set by Transport::attach() and accept_control()

 protected:
  explicit ControlEndpoint(const Hello& opened_by) : Endpoint(false, opened_by) {}
  void report_loss(const std::string& why) override { sink->on_lost(*this, why); }
};

}  // namespace bps::transport

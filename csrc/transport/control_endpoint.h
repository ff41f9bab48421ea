// SPDX-License-Identifier: Apache-2.0
// The control plane of a connection: short messages, in order. Payload never travels here. Threading: the loop's.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/error.h"
#include "transport/endpoint.h"

namespace bps::transport {

inline constexpr std::size_t kMaxMessage = 1 << 16;

class ControlEndpoint;

// The user of a control endpoint. Called on the transport's thread; must not block.
class ControlSink {
 public:
  virtual void on_message(ControlEndpoint& from, std::span<const std::byte> message) = 0;
  virtual void on_lost(Endpoint& peer, const std::string& why) = 0;

 protected:
  ~ControlSink() = default;
};

class ControlEndpoint : public Endpoint {
 public:
  // Copies the message, which has at most kMaxMessage bytes. Messages of one endpoint are never reordered. kPeerLost:
  // the peer is lost; kProtocol: the message is too long.
  virtual Status send(std::span<const std::byte> message) = 0;

  ControlSink* sink = nullptr;  // set by Transport::attach() and accept_control()

 protected:
  explicit ControlEndpoint(const Hello& opened_by) : Endpoint(false, opened_by) {}
  void report_loss(const std::string& why) override { sink->on_lost(*this, why); }
};

}  // namespace bps::transport

// SPDX-License-Identifier: Apache-2.0
// Makes one control plane of several paths between two loops: an ordered stream of messages that outlives each single
// connection.
//
// A path is a pair of rails, one of each side, with a control connection and data connections of its own. Messages go
// out by one path until that is lost, and then by another. Each message has a number, and tells how many of the peer's
// have come in. A message that the peer has not confirmed is kept, and sent again, in order, when a path is lost. A
// message that comes twice is dropped. So nothing is lost or reordered while one path is left.
//
// With a single connection (path 0 in its hello) messages travel as they are, and none is kept. Belongs to the thread
// of the event loop.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "core/bytes.h"
#include "transport/control_endpoint.h"

namespace bps::transport {

// This is the interval at which the paths of a connection are asked whether the network still carries what they send.
inline constexpr double kPathCheck_s = 0.1;

class ControlPaths {
 public:
  // A header travels in front of each message, and is counted in kMaxMessage.
  struct Head {
    std::uint64_t number = 0;    // that of the message, from 1; 0: this is a confirmation alone
    std::uint64_t received = 0;  // how many of the peer's messages have come in
    static constexpr void fields(auto& io, auto& m) { io(m.number, m.received); }
  };

  void add(ControlEndpoint* endpoint);
  // The endpoint is lost, or given up. Messages that are not confirmed go out again by another one, if there is one.
  void remove(ControlEndpoint* endpoint);
  bool empty() const { return endpoints_.empty(); }

  Status send(Bytes message);
  // Returns the message to be handled, without its header. Returns nothing for a message that came twice, for a
  // confirmation, and for what is malformed.
  std::optional<std::span<const std::byte>> receive(std::span<const std::byte> message);

  std::size_t unconfirmed() const { return sent_.size(); }

 private:
  struct Sent {
    std::uint64_t number;
    Bytes message;
  };
  // A peer that sends little itself confirms after this many messages.
  static constexpr std::uint64_t kConfirmEvery = 16;

  Status transmit(std::uint64_t number, std::span<const std::byte> message);

  std::vector<ControlEndpoint*> endpoints_;  // the first one is in use
  bool numbered_ = false;
  std::uint64_t last_sent_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t confirmed_ = 0;  // how many of those received have been confirmed to the peer
  std::deque<Sent> sent_;
};

}  // namespace bps::transport

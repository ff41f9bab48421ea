// SPDX-License-Identifier: Apache-2.0
// The control plane of two loops that are joined by several paths: one ordered stream of messages, which outlives each
// single connection.
//
// A path is a pair of rails, one of each side, with a control connection and data connections of its own. Messages go
// out by one path until that is lost, and then by another. Each has a number, and tells how many of the peer's have
// come in. What the peer has not confirmed is kept and sent again, in order, when a path is lost; what comes twice is
// dropped. So nothing is lost or reordered while one path is left.
//
// With a single connection (path 0 in its hello) messages travel as they are, and nothing is kept.
// Threading: the loop's.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "core/bytes.h"
#include "transport/control_endpoint.h"

namespace bps::transport {

// The paths of a connection are asked so often whether the network still carries what is sent by them.
inline constexpr double kPathCheck_s = 0.1;

class ControlPaths {
 public:
  // A header travels in front of each message: kMaxMessage includes it.
  struct Head {
    std::uint64_t number = 0;    // from 1; 0: nothing but a confirmation
    std::uint64_t received = 0;  // of the peer's messages
    static constexpr void fields(auto& io, auto& m) { io(m.number, m.received); }
  };

  void add(ControlEndpoint* endpoint);
  // It is lost, or given up. What was sent and not confirmed goes out again by another one, if there is one.
  void remove(ControlEndpoint* endpoint);
  bool empty() const { return endpoints_.empty(); }

  Status send(Bytes message);
  // Returns what to handle of what has come in: nothing for what came twice, for a confirmation, and for what is
  // malformed.
  std::optional<std::span<const std::byte>> receive(std::span<const std::byte> message);

  std::size_t unconfirmed() const { return sent_.size(); }

 private:
  struct Sent {
    std::uint64_t number;
    Bytes message;
  };
  // A peer that sends little itself confirms after so many messages.
  static constexpr std::uint64_t kConfirmEvery = 16;

  Status transmit(std::uint64_t number, std::span<const std::byte> message);

  std::vector<ControlEndpoint*> endpoints_;  // the first one is in use
  bool numbered_ = false;
  std::uint64_t last_sent_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t confirmed_ = 0;  // of those received, to the peer
  std::deque<Sent> sent_;
};

}  // namespace bps::transport

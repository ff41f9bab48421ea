// SPDX-License-Identifier: Apache-2.0
// Joins the two halves of a relay: the rounds of its host (server/), and the way from there to the network (worker/).
// Both run on one thread, and know each other only by these interfaces.
//
// When all ranks of a host have pushed a partition, the rounds hand a contribution to the sender. It is summed only
// when it can be sent: the most urgent first, and bounded by what the server has granted. It ends with exactly one
// deliver() or fail(). In two phases (kTwoPhase) propose() comes before deliver(), and gives the ranks the result.
// deliver() then says that every host has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/error.h"
#include "tensor/push_header.h"

namespace bps::tensor {

// Runs the rounds of a host. Nothing here throws or blocks.
class ContributionSource {
 public:
  // Sums what the ranks of the host have pushed, into their type, or, for 16-bit floats whose mean is left to the
  // server, into float32. May be called more than once, if the first result was not sent.
  virtual Status sum(std::uint32_t contribution, Dtype as, std::byte* into) = 0;
  // Takes the server's answer: `result` holds the sum of all hosts, or what was read if the contribution asked for no
  // data.
  virtual void deliver(std::uint32_t contribution, const std::byte* result) = 0;
  // Takes the result in two phases. It stays until deliver() or fail(), and counts when all hosts have it.
  virtual void propose(std::uint32_t contribution, const std::byte* result) = 0;
  // `missing` are the worker ranks for which the server still waited, if it says so.
  virtual void fail(std::uint32_t contribution, const Error& why, std::span<const std::uint32_t> missing) = 0;
  // Is called when the server says that a round of the network has failed before this host contributed.
  virtual void fail_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t round,
                          const Error& why) = 0;
  // Is called when the server loop `place` says that the ranks of this host have left, and that it has no contribution
  // to this round.
  virtual void end_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t round,
                         std::uint32_t place, const Error& why) = 0;

 protected:
  ~ContributionSource() = default;
};

// Sends contributions to the servers.
class ContributionSender {
 public:
  // Returns the length of the longest partition that it can send.
  virtual std::uint64_t largest() const = 0;
  // Sends a contribution to the server loop `place`. The sender adds to `header` the epoch, the immediate and where the
  // answer goes. May call fail() at once.
  virtual void contribute(std::uint32_t contribution, const PushHeader& header, std::int32_t priority,
                          std::uint32_t place) = 0;
  // Gives a contribution up. An answer that is on its way may still be delivered.
  virtual void cancel(std::uint32_t contribution, const Error& why) = 0;
  // Is called in two phases when all ranks of the host have the result in their hands.
  virtual void note_landed(std::uint32_t contribution) = 0;
  // Tells the server that this host will not contribute to a round, so that the other hosts learn of it.
  virtual void refuse(const PushHeader& header, std::uint32_t place, const Error& why) = 0;

 protected:
  ~ContributionSender() = default;
};

}  // namespace bps::tensor

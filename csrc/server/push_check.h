// SPDX-License-Identifier: Apache-2.0
// Checks a push header against what its sender may send, by pure functions. Nothing in a header is used before this.
#pragma once

#include <cstdint>

#include "server/round_group.h"
#include "tensor/push_header.h"

namespace bps::server {

// Holds the facts about a push that do not rest on its header.
struct PushLimits {
  const RoundGroup* group = nullptr;  // the group that the header names, if it exists
  const van::Hosts* hosts = nullptr;
  bool direct = false;  // the sender is on this host, and its memory can be reached
  std::uint32_t sender_rank = 0;
  std::uint64_t largest_partition = 0;
  std::uint64_t payload = 0;  // bytes that the header says there are, if there are any
  bool is_whole = false;      // as many bytes have landed, or were posted, as the header says there are
};

// Does what may_contribute() does, where hosts contribute to the group, or in a round of a host.
bool may_contribute_for_host(const tensor::PushHeader& header, const PushLimits& limits);

// Returns true where the sender may contribute in the name of the member that the header says.
inline bool may_contribute(const tensor::PushHeader& header, const PushLimits& limits) {
  const RoundGroup& group = *limits.group;
  if ((header.flags & tensor::kForHost) != 0 || group.network.has_hosts()) {
    return may_contribute_for_host(header, limits);
  }
  return header.position < group.group.size() && group.group.ranks[header.position] == limits.sender_rank;
}

// Returns true where a push brings the sum of several ranks.
inline bool sums_for_host(const tensor::PushHeader& header, const PushLimits& limits) {
  const van::Contributors& network = limits.group->network;
  return (header.flags & tensor::kForHost) == 0 && network.has_hosts() &&
         network[network.of_position(header.position)].is_host();
}

// Returns the fault of the header ("its length is not allowed"), or nullptr.
inline const char* find_fault(const tensor::PushHeader& header, const PushLimits& limits) {
  if (!codec::accepts(header)) return "its version, dtype, operation, flags or length is not one that a worker sends";
  if (header.length > limits.largest_partition) return "it is longer than the largest partition";
  if (limits.group == nullptr || !may_contribute(header, limits)) {
    return "its group is unknown or does not contain the sender";
  }
  const bool has_payload = (header.flags & tensor::kHasPayload) != 0;
  if (limits.payload == 0) return "its payload is not what its flags say, or stands for far more than it sends";
  if (!limits.is_whole) {
    return "its payload is not as long as its header says";
  }
  const bool is_unrounded = (header.flags & tensor::kUnrounded) != 0;
  if (is_exact(header.op) && has_payload && is_unrounded != sums_for_host(header, limits)) {
    return "its sum is not made as exact sums are";
  }
  return nullptr;
}

// Returns true where two pushes of one group can belong to one round.
inline bool agree(const tensor::PushHeader& one, const tensor::PushHeader& other) {
  return one.dtype == other.dtype && one.op == other.op && one.kind == other.kind && one.length == other.length &&
         one.root == other.root && ((one.flags ^ other.flags) & tensor::kTwoPhase) == 0;
}

}  // namespace bps::server

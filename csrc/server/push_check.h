// SPDX-License-Identifier: Apache-2.0
// Checks a push header against what its sender may send. Pure; nothing in a header is used before this.
#pragma once

#include <cstdint>

#include "server/round_group.h"
#include "tensor/push_header.h"

namespace bps::server {

// What is known of a push without trusting its header.
struct PushLimits {
  const RoundGroup* group = nullptr;  // the one that the header names, if it exists
  const van::Hosts* hosts = nullptr;
  bool direct = false;  // the sender is on this host, and its memory can be reached
  std::uint32_t sender_rank = 0;
  std::uint64_t largest_partition = 0;
  std::uint64_t room = 0;  // bytes for a payload where the push has landed, or the length of what was posted
  bool landed = false;     // in a slot, which may be longer than the payload; what is posted may not
};

// What is wrong with the header ("its length is not allowed"), or nullptr.
const char* find_fault(const tensor::PushHeader& header, const PushLimits& limits);

// Whether two pushes can belong to one round.
inline bool agree(const tensor::PushHeader& one, const tensor::PushHeader& other) {
  return one.dtype == other.dtype && one.op == other.op && one.kind == other.kind && one.length == other.length &&
         one.group == other.group;
}

}  // namespace bps::server
